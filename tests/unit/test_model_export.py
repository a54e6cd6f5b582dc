"""An exported model is whole: what Transformers loads samples as the trained one does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from areal_ray.engines.torch_train import TorchTrainEngine
from areal_ray.engines.train_config import LearnerConfig
from areal_ray.errors import DataError
from tests.support.needs import needs_deepspeed
from tests.support.tiny_models import write_tiny_model

FAMILIES = {
    "qwen3": {},
    "qwen2": {"tie_word_embeddings": False},
    "llama": {"attention_bias": True, "tie_word_embeddings": False},
    "gemma": {},
    "gpt2": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_it_has_the_same_logits_in_each_family(tmp_path, family):
    source = write_tiny_model(tmp_path / "source", family, **FAMILIES[family])
    TorchTrainEngine(source, LearnerConfig()).export(tmp_path / "made")
    ids = torch.arange(4, 20)[None]
    logits = []
    for folder in (source, tmp_path / "made"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            logits.append(model(ids).logits)
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=0)


def test_what_lies_beside_the_weights_comes_back_byte_for_byte(tmp_path):
    source = write_tiny_model(tmp_path / "source")
    (source / "additional_chat_templates").mkdir()
    files = {
        "generation_config.json": json.dumps({"eos_token_id": [1, 2], "temperature": 0.6}),
        "additional_chat_templates/tools.jinja": "{{ messages }}",
        "spiece.model": "pieces",
        "vocab.json": "{}",
    }
    for name, content in files.items():
        (source / name).write_text(content)
    TorchTrainEngine(source, LearnerConfig()).export(tmp_path / "made")
    for name in (*files, "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "made" / name).read_bytes() == (source / name).read_bytes(), name


def test_a_generation_config_that_transformers_would_not_save_does_not_lose_the_model(tmp_path):
    source = write_tiny_model(tmp_path / "source")
    said = {"do_sample": False, "temperature": 0.6, "eos_token_id": 2}
    (source / "generation_config.json").write_text(json.dumps(said))
    engine = TorchTrainEngine(source, LearnerConfig())
    engine.export(tmp_path / "made")
    assert json.loads((tmp_path / "made" / "generation_config.json").read_text()) == said
    assert GenerationConfig.from_pretrained(tmp_path / "made").eos_token_id == 2
    assert AutoTokenizer.from_pretrained(tmp_path / "made").eos_token == "<|im_end|>"


def test_a_model_without_a_generation_config_gets_one(tmp_path):
    source = write_tiny_model(tmp_path / "source")
    (source / "generation_config.json").unlink()
    TorchTrainEngine(source, LearnerConfig()).export(tmp_path / "made")
    assert GenerationConfig.from_pretrained(tmp_path / "made").eos_token_id == 2


def test_a_name_that_is_no_folder_and_not_on_the_hub_is_told_at_the_start(tmp_path):
    with pytest.raises(DataError, match=r"model\.path: .* is not a local folder and the hub did"):
        TorchTrainEngine("nobody/has-this-model", LearnerConfig())


@needs_deepspeed
def test_saving_a_model_says_nothing_of_deepspeed(tmp_path: Path) -> None:
    code = f"from areal_ray.engines.tiny_model import create; create({str(tmp_path)!r}, 0)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "accelerator" not in told.stdout + told.stderr
