"""A random model of 0.1 M parameters that is otherwise an ordinary checkpoint.

What `areal-ray train RECIPE --smoke` puts in place of a recipe's models: Qwen3 architecture,
byte-level tokenizer, ChatML. It is written in well under a second and loads like any other.
"""

from pathlib import Path
from typing import Any

from areal_ray.engines.deepspeed_device import name_device

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CONTEXT_TOKENS = 4096
_SPREAD = 0.08
"""Of the random weights: wide enough for next-token distributions that are not all alike."""


TEACHER_FOLDER = "teacher"
"""Inside the model's: another random model of the same vocabulary."""


def create(folder: Path, seed: int) -> None:
    """Write the checkpoint of `seed` and its teacher into `folder`: a `model.create` function."""
    _write(Path(folder) / TEACHER_FOLDER, seed + 1)
    _write(Path(folder), seed)  # last: a folder with config.json counts as whole


def _write(folder: Path, seed: int) -> None:
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "intermediate_size": 96,
        "max_position_embeddings": _CONTEXT_TOKENS,
        "initializer_range": _SPREAD,
    }
    write_random_qwen3(folder, _tokenizer(), seed, **sizes)


def write_random_qwen3(folder: Path, tokenizer: Any, seed: int, **sizes: Any) -> None:
    """Write a Qwen3 checkpoint with random float32 weights, a tied head and `tokenizer`.

    Args:
        folder: Made where it is missing.
        tokenizer: Its size is the vocabulary's; its end and padding tokens are the model's.
        seed: Of the weights.
        sizes: Fields of the Hugging Face config.
    """
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(
        vocab_size=len(tokenizer), tie_word_embeddings=True, bos_token_id=None, **ends, **sizes
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).to(torch.float32)
    model.generation_config = GenerationConfig(**ends)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    name_device()
    model.save_pretrained(folder)


def _tokenizer() -> Any:
    """One token for each byte, and the special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: number for number, token in enumerate(alphabet)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.add_special_tokens(list(SPECIAL_TOKENS))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
        model_max_length=_CONTEXT_TOKENS,
    )
