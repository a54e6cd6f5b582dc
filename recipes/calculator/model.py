"""A model small enough to learn on a laptop, and otherwise like any other checkpoint.

Qwen3 architecture, 0.13 M parameters, random weights; byte-level BPE trained on the task text, with
single digits; ChatML. `transformers` loads it like a model from the hub.
"""

from pathlib import Path
from typing import Any

from areal_ray.engines.tiny_model import CHATML, SPECIAL_TOKENS, write_random_qwen3
from recipes.calculator.tasks import text_corpus

VOCABULARY = 407
TOOL_TOKENS = ("<tool>", "</tool>")


def create(folder: Path, seed: int) -> None:
    """Write the checkpoint of `seed` into `folder`.

    The initializer range is four times the usual one: with .02 copying two numbers into the tool
    call was not learned in a few hundred steps.
    """
    write_random_qwen3(
        Path(folder),
        make_tokenizer(),
        seed,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=192,
        max_position_embeddings=512,
        initializer_range=0.08,
    )


def make_tokenizer() -> Any:
    """The tokenizer; the same for every seed."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TOOL_TOKENS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(text_corpus(), trainer)
    # Not special: they are part of what the model says, and stay in decoded text.
    core.add_tokens([AddedToken(token, special=False) for token in TOOL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
