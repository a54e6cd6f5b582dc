"""Tells DeepSpeed the device in runs without it: saving a Hugging Face model imports it where it is
installed, and it warns where it has to guess."""

import os


def name_device() -> None:
    """To be called before a model is saved; what is named already stays."""
    import torch

    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
