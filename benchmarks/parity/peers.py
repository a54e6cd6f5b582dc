"""The public implementations; each is imported as it was published, or named as missing.

trl comes with the extra `bench`. The others pull in far more than their mathematics, so they go
into a folder of their own, without what they depend on:

    pip install --target peers --no-deps verl==0.9.1 openrlhf==0.11.2 skyrl==0.3.0 \
        tensordict==0.15.3 pyvers cloudpickle orjson omegaconf antlr4-python3-runtime==4.9.3 \
        codetiming jaxtyping wadler-lindig loguru
"""

import importlib
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType, SimpleNamespace

PACKAGES = ("trl", "verl", "openrlhf", "skyrl")


class Peers:
    """Modules of the peers that could be imported, and why the others could not."""

    def __init__(self, folder: Path | None) -> None:
        self.missing: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        if folder is not None:
            # Behind everything else: of a package that is here too, ours is taken.
            sys.path += [str(folder), str(folder / "skyrl-gym")]
        self.trl = self._load("trl", _trl)
        self.verl = self._load("verl", _verl)
        self.openrlhf = self._load("openrlhf", _openrlhf, folder)
        self.skyrl = self._load("skyrl", _skyrl, folder)

    def _load(self, name: str, load, *given) -> SimpleNamespace | None:
        try:
            found = load(*given)
            self.versions[name] = version(name)
        except (ImportError, PackageNotFoundError) as error:
            self.missing[name] = str(error)
            return None
        return found


def _trl() -> SimpleNamespace:
    return SimpleNamespace(
        grpo=importlib.import_module("trl.trainer.grpo_trainer").GRPOTrainer,
        dpo=importlib.import_module("trl.trainer.dpo_trainer").DPOTrainer,
        gkd=importlib.import_module("trl.experimental.gkd.gkd_trainer").GKDTrainer,
    )


def _verl() -> SimpleNamespace:
    return SimpleNamespace(
        core=importlib.import_module("verl.trainer.ppo.core_algos"),
        correction=importlib.import_module("verl.trainer.ppo.rollout_corr_helper"),
        Config=importlib.import_module("verl.workers.config").ActorConfig,
    )


def _openrlhf(folder: Path | None) -> SimpleNamespace:
    _shells(folder, "openrlhf", "openrlhf.models", "openrlhf.utils", "openrlhf.trainer")
    _shells(folder, "openrlhf.trainer.ppo_utils")
    # models/utils.py imports it for one function that has nothing to do with losses.
    has_deepspeed = "deepspeed" in sys.modules
    if not has_deepspeed:
        sys.modules["deepspeed"] = ModuleType("deepspeed")
        sys.modules["deepspeed"].__spec__ = ModuleSpec("deepspeed", None)
    try:
        return SimpleNamespace(
            loss=importlib.import_module("openrlhf.models.loss"),
            utils=importlib.import_module("openrlhf.models.utils"),
            length=importlib.import_module("openrlhf.trainer.ppo_utils.length_penalty"),
        )
    finally:
        if not has_deepspeed:
            del sys.modules["deepspeed"]


def _skyrl(folder: Path | None) -> SimpleNamespace:
    _shells(folder, "skyrl", "skyrl.backends", "skyrl.backends.skyrl_train")
    _shells(folder, "skyrl.backends.skyrl_train.utils", "skyrl.train")
    module = importlib.import_module("skyrl.backends.skyrl_train.utils.ppo_utils")
    return SimpleNamespace(core=module, Config=module.AlgorithmConfig)


def _shells(folder: Path | None, *names: str) -> None:
    """Packages whose own `__init__` does not run: it imports engines that the maths never uses."""
    for name in names:
        path = (folder or Path()) / name.replace(".", "/")
        if name not in sys.modules and path.is_dir():
            shell = ModuleType(name)
            shell.__path__ = [str(path)]
            sys.modules[name] = shell
