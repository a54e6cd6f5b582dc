"""Small random models that are ordinary Hugging Face checkpoints: weights, config, tokenizer.

Byte-level BPE with a ChatML template, `<|im_end|>` as end of turn and `<|endoftext|>` as padding.
They write and load in well under a second and cover each family the engines know.
"""

from pathlib import Path
from typing import Any

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SMALLEST_VOCABULARY = 256 + len(SPECIAL_TOKENS)
_FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
_OTHERS = ("gemma", "gemma2", "gemma3_text", "olmo2", "phi3", "stablelm")


def write_tiny_model(
    folder: Path | str,
    architecture: str = "qwen3",
    vocab_size: int = 384,
    seed: int = 0,
    **config_fields: Any,
) -> Path:
    """Save a random model of about 0.13 M parameters with its tokenizer; returns the folder.

    Args:
        folder: Created when missing.
        architecture: llama, qwen2, qwen3, mistral; for engines' fallbacks gpt2 or of `_OTHERS`.
        vocab_size: Of model and tokenizer, at least `SMALLEST_VOCABULARY`.
        seed: Of the random weights; the same seed writes the same checkpoint.
        config_fields: Override fields of the Hugging Face config (num_key_value_heads=1, ...).
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer(vocab_size)
    config = _config(architecture, vocab_size, tokenizer, config_fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _scatter_constant_parameters(model)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_tokenizer(vocab_size: int = 384) -> Any:
    """A byte-level BPE `PreTrainedTokenizerFast` with single digits and a ChatML template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"vocab_size = {vocab_size}, must be >= {SMALLEST_VOCABULARY}: one token for each byte"
        )
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def _config(architecture: str, vocab_size: int, tokenizer: Any, fields: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    shared = {
        "vocab_size": vocab_size,
        "initializer_range": 0.08,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    if architecture == "gpt2":
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 1024}
        return AutoConfig.for_model("gpt2", **{**shared, **sizes, **fields})
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 192,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    }
    known = (*_FAMILIES, *_OTHERS)
    if architecture not in known:
        raise ValueError(f"architecture = {architecture!r}, must be one of {known}, gpt2")
    return AutoConfig.for_model(architecture, **{**shared, **sizes, **fields})


def _scatter_constant_parameters(model: Any) -> None:
    """Move norm weights and biases off the ones and zeros they start at, where a bug could hide."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))


_CORPUS = (
    "Tom has 17 apples and buys 25 more. How many apples now? The answer is 42.",
    "Ann had 63 books and gave away 28 books. How many books are left? She has 35 books.",
    "What is 12 plus 30? Answer with just the number. system user assistant tool",
    "You are a helpful assistant that solves problems step by step with a calculator.",
    "Ben sells 40 coins and finds 11 coins. Now Ben has some coins, how many in all?",
    "The quick brown fox jumps over the lazy dog while seven wizards quietly box.",
    "Sort these numbers from small to large: 9 4 7 1 3. Sorted they are 1 3 4 7 9.",
    "Mia reads pages every day; there were more pages yesterday than there are today.",
)

WIDE = {
    "hidden_size": 1392,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "initializer_range": 0.02,
}
"""Of a model whose every linear weight is large enough that the embedded engine packs it."""
