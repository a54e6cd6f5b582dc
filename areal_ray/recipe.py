"""Recipe: one YAML file plus `key=value` overrides, as a frozen, checked object.

`load_recipe` reads and checks it without Ray or torch; `areal_ray.preflight` then looks at the
files and the code it names. The recipe as run is saved with each run and reads back the same.
"""

import hashlib
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import Field, PrivateAttr, model_validator

from areal_ray.agents.episode import AgentConfig
from areal_ray.agents.task_stream import TasksConfig
from areal_ray.algorithms.objective import ObjectiveConfig
from areal_ray.checkpoint import CheckpointConfig
from areal_ray.core import typed_yaml, yaml_tree
from areal_ray.core.bounds import BoundsConfig
from areal_ray.core.config import Config
from areal_ray.core.imports import import_roots
from areal_ray.core.versions import AdmissionConfig
from areal_ray.engines import objective_checks
from areal_ray.engines.preference import PreferenceConfig
from areal_ray.engines.sft import SftConfig
from areal_ray.engines.train_config import (
    Companions,
    CriticConfig,
    LearnerConfig,
    ReferenceConfig,
    TeacherConfig,
)
from areal_ray.errors import RecipeError
from areal_ray.kinds import Parts, RunKind, parts_of, section_problems
from areal_ray.rewards.reward import ABSTAIN, RewardConfig
from areal_ray.run_folder import RECIPE_FILE as RECIPE_FILE
from areal_ray.runtime.gateway_config import GatewayConfig
from areal_ray.runtime.rollout_config import RolloutConfig
from areal_ray.runtime.run_config import (
    ClusterConfig,
    DeadlinesConfig,
    EvaluationConfig,
    ModelConfig,
    SchedulerConfig,
)
from areal_ray.runtime.weights_config import WeightsConfig
from areal_ray.telemetry.log import redact_all
from areal_ray.telemetry.sinks import TelemetryConfig

MODEL_FOLDER = "model"
"""Of a run's final Hugging Face checkpoint, in its folder."""
REWARD_MODEL = "areal_ray.engines.reward_model:score"
"""`reward.score` where the reward is a model."""

_SEED = "{seed}"
_FILEROOT = "{fileroot}"


class Recipe(Config):
    """All that a run is made of."""

    kind: RunKind
    """rl: learn from rewards. online: the same, from agents that call the gateway. sft: from given
    answers. dpo: from pairs of answers. reward_model: learn to score answers. distill: learn from
    a teacher. eval: score a model. inference: serve a model to programs that call the gateway."""
    name: str = Field(min_length=1, max_length=100)
    """Of the run and its folder. `{seed}` stands for the seed."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Of everything that is drawn."""
    steps: int = Field(0, ge=0)
    """Learner steps of kinds rl, online and distill; the others say it in their own sections."""
    model: ModelConfig
    """What is sampled from and trained."""
    tasks: TasksConfig | None = None
    """What is trained on."""
    agent: AgentConfig = AgentConfig()
    """How a task is attempted."""
    reward: RewardConfig | None = None
    """How an attempt is scored."""
    admission: AdmissionConfig | None = None
    """How many groups a step takes, and how far rollouts run ahead."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """What is maximised."""
    critic: CriticConfig | None = None
    """Value model beside the policy (kind ppo)."""
    reference: ReferenceConfig | None = None
    """Frozen model that objective.kl is measured against, or that DPO starts from."""
    teacher: TeacherConfig | None = None
    """Frozen model that objective.distillation, or kind distill, learns from."""
    gateway: GatewayConfig = GatewayConfig()
    """Where programs of their own reach the model (kinds online and inference)."""
    rollout: RolloutConfig = RolloutConfig()
    """The generation engines."""
    learner: LearnerConfig = LearnerConfig()
    """The training engine."""
    sft: SftConfig | None = None
    """Phases on given conversations (kind sft; kind distill where given)."""
    preference: PreferenceConfig | None = None
    """Pairs of answers (kinds dpo and reward_model)."""
    weights: WeightsConfig = WeightsConfig()
    """How new weights travel."""
    evaluation: EvaluationConfig | None = None
    """Held-out tasks beside training; null = none."""
    bounds: BoundsConfig = BoundsConfig()
    """What has to hold before new weights are promoted (kinds rl, online and distill)."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When to save, and how many to keep."""
    cluster: ClusterConfig = ClusterConfig()
    """Nodes, GPUs and where the run folder lies."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """Whether a Ray is started here or a running one joined."""
    deadlines: DeadlinesConfig = DeadlinesConfig()
    """How long the run waits for what."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """What the run tells."""

    _origin: Path | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = [
            *section_problems(self),
            *self._name_problems(),
            *self._training_problems(),
            *self._gpu_problems(),
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def parts(self) -> Parts:
        """Loop and actors of its kind."""
        return parts_of(self.kind, has_sft=self.sft is not None)

    @property
    def scoring(self) -> RewardConfig | None:
        """What scores episodes. Of kind online one that abstains where the recipe has none, since
        rewards come from clients; its actor still writes groups to the journal."""
        if self.reward is None and self.parts.serves and self.parts.trains:
            return RewardConfig(score=ABSTAIN)
        return self.reward

    @property
    def run_name(self) -> str:
        """The name with the seed in it."""
        return self.name.replace(_SEED, str(self.seed))

    @property
    def folder(self) -> Path:
        """Where the run keeps everything."""
        return Path(self.cluster.fileroot) / self.run_name

    @property
    def model_path(self) -> str:
        """Folder or hub name of the model, with seed and fileroot in it."""
        return self._placed(self.model.path)

    @property
    def served_name(self) -> str:
        """What clients of a gateway are told that the model is called."""
        return "policy" if self.parts.trains else self.model.path

    @property
    def companions(self) -> Companions:
        """The models beside the policy; `model_path` where a section gives no path of its own."""

        def place(section: CriticConfig | ReferenceConfig | TeacherConfig | None) -> str:
            wanted = None if section is None else self._placed(section.path or self.model.path)
            return "" if wanted is None else absolute_path(wanted)

        return Companions(
            reference_path=place(self.reference),
            teacher_path=place(self.teacher),
            critic_path=place(self.critic),
            critic=self.critic or CriticConfig(),
        )

    def _placed(self, path: str) -> str:
        path = path.replace(_FILEROOT, self.cluster.fileroot)
        return path.replace(_SEED, str(self.seed))

    @property
    def origin(self) -> Path | None:
        """The file it was read from; None where it was made in code."""
        return self._origin

    @property
    def import_roots(self) -> list[Path]:
        """Folders in which the code it names is looked for first."""
        return import_roots(self._origin)

    @property
    def cautions(self) -> list[str]:
        """What may work and rarely does, one line each; told when it is planned or run."""
        if self.parts.loop != "train" or self.admission is None:
            return []
        ahead = self.admission.max_head_offpolicyness
        return objective_checks.objective_cautions(self.objective, ahead)

    @property
    def digest(self) -> str:
        """16 hex digits; equal for recipes with equal values, whatever file they came from."""
        plain = json.dumps(typed_yaml.untyped_values(self), sort_keys=True)
        return hashlib.sha256(plain.encode()).hexdigest()[:16]

    def to_yaml(self, secrets: Collection[str] = ()) -> str:
        """Every key with its value, secrets blotted out; without any it reads back as the same."""
        return yaml_tree.write_yaml(redact_all(typed_yaml.untyped_values(self), secrets))

    def _name_problems(self) -> list[str]:
        if "/" in self.name or not self.name.isprintable() or self.name.strip(". ") != self.name:
            return [
                f"name: is {self.name!r}; must be a plain folder name in one line, without '/' and "
                "without dots or spaces at its ends. The folder above it is cluster.fileroot."
            ]
        return []

    def _training_problems(self) -> list[str]:
        if self.parts.loop != "train" or self.admission is None:
            return []
        problems = []
        if self.steps == 0:
            problems.append(f"steps: is 0; must be >= 1 for kind: {self.kind}. Say how many.")
        groups, minibatches = self.admission.groups_per_step, self.learner.ppo_n_minibatches
        if groups % minibatches:
            problems.append(
                f"learner.ppo_n_minibatches: is {minibatches}; must divide "
                f"admission.groups_per_step = {groups}. Change one of them."
            )
        if self.rollout.sampling.temperature == 0:
            problems.append(
                "rollout.sampling.temperature: is 0; must be above 0 for training, since greedy "
                "samples of a task are all alike. Use 1.0; evaluation.sampling may be 0."
            )
        problems += [
            f"rollout.sampling.{name}: is {getattr(self.rollout.sampling, name)}; must be left out "
            "for training, where what samples has to be the policy itself. Move it to "
            "evaluation.sampling."
            for name in self.rollout.sampling.adjustments
        ]
        around = objective_checks.Surroundings(
            critic=self.critic,
            reference=self.reference,
            teacher=self.teacher,
            sampling=self.rollout.sampling,
            n_samples=self.admission.n_samples,
            groups_per_step=groups,
            num_minibatches=minibatches,
        )
        return problems + objective_checks.objective_problems(self.objective, around)

    def _gpu_problems(self) -> list[str]:
        supply = self.cluster.n_nodes * self.cluster.n_gpus_per_node
        rollouts = self.rollout.replicas * self.rollout.num_gpus
        learners = self.learner.ranks * self.learner.num_gpus
        demand = rollouts * self.parts.samples + learners * self.parts.trains
        unreserved = [
            f"{name}.num_gpus: is 0 with {name}.engine.device {section.engine.device}; must be "
            "above 0, so that the actor has a GPU of its own. Set it, or device to cpu."
            for name, section in (("rollout", self.rollout), ("learner", self.learner))
            if section.engine.device.startswith("cuda") and section.num_gpus == 0
        ]
        split = self.rollout.tensor_parallel
        if split > 1 and self.rollout.num_gpus != split:
            unreserved.append(
                f"rollout.num_gpus: is {self.rollout.num_gpus:g} with rollout.engine."
                f"tensor_parallel {split}; must be {split}, one GPU for each part of the model. "
                "Change one of them."
            )
        if demand <= supply:
            return unreserved
        return [
            *unreserved,
            f"cluster.n_gpus_per_node: is {self.cluster.n_gpus_per_node} on n_nodes = "
            f"{self.cluster.n_nodes}; must hold {demand:g} GPUs (rollout {rollouts:g}, learner "
            f"{learners:g}). Raise it, or lower rollout.replicas, learner.ranks or their num_gpus.",
        ]


def absolute_path(model_path: str) -> str:
    """A folder as an absolute path, since actors may work elsewhere; a hub name as it is."""
    return str(Path(model_path).resolve()) if Path(model_path).is_dir() else model_path


def load_recipe(
    path: Path | str, overrides: Sequence[str] = (), *, is_checked: bool = True
) -> Recipe:
    """The recipe of a file with `key=value` overrides applied in order.

    Args:
        path: The file.
        overrides: Of the command line.
        is_checked: False for a recipe that something will be changed in yet: each key must be
            sound by itself, but they need not go together.

    Raises:
        RecipeError: all that is wrong with it, one line each.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise RecipeError(f"{path}: {reason}; must be a recipe (YAML). Check the path.") from error
    return parse_recipe(text, overrides, origin=path, is_checked=is_checked)


def parse_recipe(
    text: str,
    overrides: Sequence[str] = (),
    *,
    origin: Path | None = None,
    is_checked: bool = True,
) -> Recipe:
    """The recipe of a YAML text; see `load_recipe`."""
    where = origin.name if origin is not None else "recipe"
    problems: list[str] = []
    tree = yaml_tree.Mapping({}, where)
    try:
        tree = yaml_tree.read_tree(text, where)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    for override in overrides:
        try:
            changed = yaml_tree.set_at(tree, *yaml_tree.read_override(override))
        except ValueError as error:
            told = str(error)
            problems.append(told if told.startswith("override") else f"override {override}: {told}")
            continue
        assert isinstance(changed, yaml_tree.Mapping)
        tree = changed
    recipe = typed_yaml.read_config(tree, Recipe, is_checked=is_checked)
    if isinstance(recipe, list):
        problems += recipe
    if problems or isinstance(recipe, list):
        raise RecipeError("\n".join(problems))
    recipe._origin = origin
    return recipe


def model_recipe(recipe: Recipe) -> Recipe:
    """The recipe that makes the model of this one, with the same seed.

    Raises:
        RecipeError: It cannot be read, or its run would leave the model elsewhere.
    """
    assert recipe.model.create is not None
    assert recipe.model.is_created_by_recipe
    path = _find(recipe, recipe.model.create)
    overrides = [f"seed={recipe.seed}"]
    if _FILEROOT in recipe.model.path:
        overrides.append(f"cluster.fileroot={recipe.cluster.fileroot}")
    maker = load_recipe(path, overrides)
    made = maker.folder / MODEL_FOLDER
    if made.resolve() != Path(recipe.model_path).resolve():
        raise RecipeError(
            f"model.create: {path.name} leaves its model in {made}; must be model.path = "
            f"{recipe.model_path}. Change one of them."
        )
    return maker


def evaluation_of(recipe: Recipe, run: Path | None, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of kind eval that scores this one's model.

    Args:
        run: Folder of a run whose last weights are scored instead.
        overrides: Applied to the recipe of kind eval.

    Raises:
        RecipeError: It has no held-out tasks, the run left no model, or an override is wrong.
    """
    changes = []
    if recipe.kind != "eval":
        changes += ["kind=eval", "steps=0", "admission=null", "sft=null", "preference=null"]
        changes.append("model.lora=null")  # of its base; a run's own model has the adapters in it
        changes.append(f"name={recipe.name}-eval")
    if run is not None:
        model = run / MODEL_FOLDER
        if not (model / "config.json").is_file():
            raise RecipeError(
                f"{run}: holds no {MODEL_FOLDER}/ with weights; the run must have ended. "
                f"Wait for it, or go on with it: areal-ray resume {run}"
            )
        changes += [f"model.path={model}", "model.create=null", f"cluster.fileroot={run.parent}"]
    return parse_recipe(recipe.to_yaml(), [*changes, *overrides], origin=recipe.origin)


def _find(recipe: Recipe, file: str) -> Path:
    """A file that a recipe names: from a folder above the recipe, or from the working directory."""
    above = recipe.origin.resolve().parents if recipe.origin is not None else ()
    return next((p for p in (a / file for a in above) if p.exists()), Path(file))


def recipe_schema() -> dict[str, Any]:
    """JSON schema of a recipe, for editors."""
    schema = Recipe.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
