"""What a recipe names is looked at before anything starts, and all that is wrong told at once."""

import json
from pathlib import Path

import pytest

from areal_ray.agents.episode import AgentConfig
from areal_ray.errors import RecipeError
from areal_ray.preflight import check_files, preflight
from areal_ray.recipe import Recipe, load_recipe
from areal_ray.telemetry.summary import RunEnd, summarize, write_summary
from areal_ray.telemetry.tally import RunTally
from tests.support.tiny_models import write_tiny_model

CODE = """\
from areal_ray.core.task import Task

def train(path="", empty=False):
    if path:
        open(path).close()
    return [] if empty else [Task("a", ({"role": "user", "content": "1+1"},), 2)]

async def solve(task, client):
    return None

def not_async(task, client):
    return None

def score(task, trajectory):
    return 1.0

def exits():
    raise SystemExit(3)

def raises():
    rows = {}
    return rows["colour"]

async def awaited():
    return []

def endless():
    while True:
        yield from (Task(str(i), ({"role": "user", "content": "x"},)) for i in range(10**9))

def unsendable(good=2):
    tasks = [Task(f"t{n}", ({"role": "user", "content": "x"},), n) for n in range(good)]
    return [*tasks, Task("bad", ({"role": "user", "content": "x"},), (n for n in "ab"))]

def local():
    return [Task("a", ({"role": "user", "content": "x"},), fields={"check": lambda reply: True})]

def long(size=40):
    texts = ["x", "y" * size, "z"]
    return [Task(f"t{n}", ({"role": "user", "content": t},)) for n, t in enumerate(texts)]

def odd(id="a", messages=({"role": "user", "content": "x"},)):
    return [Task("first", ({"role": "user", "content": "x"},)), Task(id, messages)]
"""


NO_TENSORS = len(b"{}").to_bytes(8, "little") + b"{}"
"""A whole safetensors file without a tensor."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe, its code and a checkpoint that looks whole."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums_code.py").write_text(CODE)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (model / "model.safetensors").write_bytes(NO_TENSORS)
    (model / "tokenizer.json").write_text("{}")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "r.yaml").write_text(
        "kind: rl\nname: sums\nsteps: 1\nmodel: {path: model}\n"
        "tasks: {source: 'sums_code:train'}\nagent: {run: 'sums_code:solve'}\n"
        "reward: {score: 'sums_code:score'}\nadmission: {groups_per_step: 1}\n"
    )
    return tmp_path


def recipe_of(folder: Path, *overrides: str) -> Recipe:
    return load_recipe(folder / "r.yaml", overrides)


def test_a_recipe_whose_files_are_there_passes(folder):
    assert check_files(recipe_of(folder)) == []
    preflight(recipe_of(folder))


def test_all_that_is_wrong_is_told_at_once(folder):
    recipe = recipe_of(
        folder,
        "model.path=gone/nowhere/model",
        "tasks.args={path: gone.jsonl}",
        "reward.score=sums_code:scroe",
        "agent.run=sums_code:not_async",
        "cluster.fileroot=/proc/runs",
    )
    with pytest.raises(RecipeError) as caught:
        preflight(recipe)
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[1] for line in lines] == [
        "cluster.fileroot",
        "model.path",
        "agent.run",
        "reward.score",
        "tasks",
    ]
    assert "Did you mean 'score'?" in lines[3]
    assert "FileNotFoundError" in lines[4]
    assert "gone.jsonl" in lines[4]
    assert all(line.startswith("r.yaml: ") for line in lines)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["agent.command=[no-such-agent]"], "agent.command: 'no-such-agent' is no program here"),
        (["agent.command=[./r.yaml]"], "agent.command: './r.yaml' may not be executed"),
        (
            ["agent.command=[python]", "agent.env={NOT_SET_HERE: null}"],
            "agent.env.NOT_SET_HERE: is null",
        ),
    ],
)
def test_a_program_that_cannot_run_is_told_before_anything_starts(folder, overrides, told):
    no_function = f"agent.run={AgentConfig().run}"
    (problem,) = check_files(recipe_of(folder, no_function, *overrides))
    assert problem.startswith(told)
    assert check_files(recipe_of(folder, no_function, "agent.command=[python, agent.py]")) == []


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("tasks.source=nowhere:train", "tasks.source: 'nowhere:train'"),
        ("tasks.source=sums_code", "must read 'package.module:name'"),
        ("tasks.args={empty: true}", "gave no tasks"),
        ("tasks.args={pth: x}", "tasks.args: sums_code:train cannot be called"),
        ("agent.args={depth: 3}", "agent.args"),
        ("model={path: x, create: gone.yaml}", "gone.yaml: No such file"),
        ("model={path: x, create: 'sums_code:mkae'}", "model.create"),
        ("evaluation={tasks: {source: 'sums_code:held'}}", "evaluation.tasks.source"),
    ],
)
def test_what_a_recipe_names_must_be_there(folder, override, told):
    problems = check_files(recipe_of(folder, override))
    assert len(problems) == 1
    assert told in problems[0]


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("exits", "tasks: raised SystemExit: 3 ("),
        ("raises", "sums_code.py, line 22)"),
        ("awaited", "gave a coroutine; must be tasks. Write an ordinary function"),
        ("endless", "gave 1,000,000 tasks and goes on. Set tasks.limit"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_task_source_that_goes_wrong_is_one_line_that_says_where(folder, source, told):
    (line,) = check_files(recipe_of(folder, f"tasks.source=sums_code:{source}"))
    assert told in line


def test_a_saved_recipe_asks_for_the_secrets_that_it_does_not_hold(folder):
    args = "reward.args={key: hf_abcdef, urls: ['https://x/?k=hf_abcdef', y]}"
    recipe = recipe_of(folder, args)
    text = recipe.to_yaml({"hf_abcdef"})
    assert "hf_abcdef" not in text
    (folder / "saved.yaml").write_text(text)
    told = check_files(load_recipe(folder / "saved.yaml"))
    assert [line.split(": ")[0] for line in told[:2]] == ["reward.args.key", "reward.args.urls.0"]
    assert "Give it again: reward.args.key=VALUE" in told[0]
    again = load_recipe(folder / "saved.yaml", [args])
    assert again.digest == recipe.digest


def test_an_endless_source_is_taken_with_a_limit(folder):
    assert check_files(recipe_of(folder, "tasks.source=sums_code:endless", "tasks.limit=3")) == []


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"id": 1}, "row 1: id is 1; must be text"),
        ({"id": ""}, "row 1: id is ''"),
        ({"id": "a\nb"}, "row 1: id is 'a\\nb'"),
        ({"messages": "hello"}, "row 1 ('a'): messages is a str"),
        ({"messages": ["hello"]}, "row 1 ('a'): messages[0].role"),
        ({"messages": [{"content": "x"}]}, "row 1 ('a'): messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content: is int"),
        ({"messages": [{"role": "user", "content": [{"image_url": "x"}]}]}, "no media are read"),
        ({"messages": [{"role": "user", "content": "x\ud800"}]}, "surrogates not allowed"),
    ],
)
def test_a_task_that_no_prompt_can_be_made_of_is_refused_with_its_row(folder, args, told):
    made = Recipe.model_copy(recipe_of(folder))
    tasks = made.tasks.model_copy(update={"source": "sums_code:odd", "args": args})
    problems = check_files(made.model_copy(update={"tasks": tasks}))
    assert len(problems) == 1, problems
    assert told in problems[0]


def test_a_task_that_cannot_travel_is_named_with_what_of_it(folder):
    (line,) = check_files(recipe_of(folder, "tasks.source=sums_code:unsendable"))
    assert line.startswith("tasks.source: sums_code:unsendable: task 'bad': answer is a generator")
    assert "cannot be pickled (TypeError: cannot pickle 'generator' object); must hold" in line
    assert check_files(recipe_of(folder, "tasks.source=sums_code:local")) == []  # Ray can


def test_a_window_beyond_the_models_is_told_before_anything_starts(folder):
    said = {"model_type": "qwen3", "max_position_embeddings": 512}
    (folder / "model" / "config.json").write_text(json.dumps(said))
    assert check_files(recipe_of(folder, "rollout.engine.max_context_tokens=512")) == []
    (line,) = check_files(recipe_of(folder, "rollout.engine.max_context_tokens=513"))
    assert line.startswith("rollout.engine.max_context_tokens: is 513; must be at most 512")


def test_a_prompt_beyond_the_context_window_is_told_before_anything_starts(folder):
    write_tiny_model(folder / "model")

    def told(*overrides):
        recipe = recipe_of(folder, "tasks.source=sums_code:long", *overrides)
        return check_files(recipe)

    window = "rollout.engine.max_context_tokens=64"
    assert told(window) == []
    (line,) = told(window, "tasks.args.size=400")
    assert line.startswith("tasks row 1 ('t1'): prompt of ")
    assert "(rollout.engine.max_context_tokens) leaves a prompt = 63. Raise it, or set" in line
    for way in ("filter", "left", "right"):
        assert told(window, "tasks.args.size=400", f"tasks.overlong={way}") == []
    held_out = "evaluation={tasks: {source: 'sums_code:long', args: {size: 400}}}"
    (line,) = told(window, held_out)
    assert line.startswith("evaluation.tasks row 1 ('t1')")


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_half_a_checkpoint_is_named(folder, missing):
    (folder / "model" / missing).unlink()
    problems = check_files(recipe_of(folder))
    assert len(problems) == 1
    assert problems[0].startswith("model.path: ")


def with_weights(model: Path, data_bytes: int) -> None:
    header = json.dumps({"w": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}}).encode()
    text = len(header).to_bytes(8, "little") + header + bytes(data_bytes)
    (model / "model.safetensors").write_bytes(text)


def test_weights_that_were_cut_short_are_told_before_an_actor_reads_them(folder):
    model = folder / "model"
    with_weights(model, 8)
    assert check_files(recipe_of(folder)) == []
    with_weights(model, 7)
    assert "bytes; must have" in check_files(recipe_of(folder))[0]
    for rest in (b"", b"\x00" * 4, b"\xff" * 40, b"\x03" + bytes(7) + b"not json"):
        (model / "model.safetensors").write_bytes(rest)
        (line,) = check_files(recipe_of(folder))
        assert "model.safetensors" in line


def test_a_part_that_the_index_names_must_be_there(folder):
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model/model.safetensors.index.json").write_text(json.dumps(index))
    (line,) = check_files(recipe_of(folder))
    assert "lacks model-00002-of-00002.safetensors" in line


def test_a_tokenizer_without_chat_template_and_a_broken_one_are_told(folder):
    model = folder / "model"
    for nothing in ("", "  \n"):
        (model / "chat_template.jinja").write_text(nothing)
        assert "has no chat template" in check_files(recipe_of(folder))[0]
    (model / "chat_template.jinja").unlink()
    assert "has no chat template" in check_files(recipe_of(folder))[0]
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert check_files(recipe_of(folder)) == []
    (model / "tokenizer.json").write_text("{")
    assert "tokenizer.json cannot be read" in check_files(recipe_of(folder))[0]


def test_a_finished_run_is_not_resumed_without_more_steps(folder):
    run = folder / "runs" / "sums"
    write_summary(run, end_of(run, "stopped", 1))
    preflight(recipe_of(folder), resume=True)  # its model is still to be written
    write_summary(run, end_of(run, "finished", 1))
    preflight(recipe_of(folder, "steps=2"), resume=True)
    with pytest.raises(RecipeError, match=r"steps: is 1; .*sums is finished .* steps=11"):
        preflight(recipe_of(folder), resume=True)


def end_of(run: Path, outcome: str, steps: int):
    run.mkdir(parents=True, exist_ok=True)
    row = {"step": steps, "version": 1, "kind": "step"}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    end = RunEnd(
        name="sums",
        kind="rl",
        outcome=outcome,
        planned_steps=1,
        version=1,
        wall_s=1.0,
        seed=0,
        **RunTally().end_facts(),
    )
    return summarize(run, end)


def test_a_folder_with_another_run_is_told_with_the_rest(folder):
    run = folder / "runs" / "sums"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text("")
    (run / "metrics.jsonl").write_text("{}")
    with pytest.raises(RecipeError, match="holds another run"):
        preflight(recipe_of(folder))
    preflight(recipe_of(folder), resume=True)
    preflight(recipe_of(folder), overwrite=True)


def test_the_recipe_that_makes_the_model_is_checked_too(folder):
    (folder / "warm.yaml").write_text(
        "kind: sft\nname: warm\nmodel: {path: model}\n"
        "sft: {phases: [{source: 'sums_code:lessons', steps: 1, batch_size: 1}]}\n"
    )
    recipe = recipe_of(folder, "model={path: runs/warm/model, create: warm.yaml}")
    problems = check_files(recipe)
    assert len(problems) == 1
    assert problems[0].startswith("warm.yaml: sft.phases.0.source: ")


def test_rows_that_learners_will_read_are_read_before_anything_starts(folder):
    (folder / "rows.py").write_text(
        "def read(path):\n    yield from open(path)\n\ndef none():\n    return []\n"
    )
    head = "kind: {}\nname: rows\nmodel: {{path: model}}\n"
    pairs = "preference: {{source: 'rows:{}', args: {}, steps: 1, batch_size: 1}}\n"
    phase = "sft: {{phases: [{{source: 'rows:{}', args: {}, steps: 1, batch_size: 1}}]}}\n"
    gone, told = "{path: gone.jsonl}", []
    for kind, section in (("sft", phase), ("dpo", "reference: {{}}\n" + pairs)):
        for source, args in (("read", gone), ("none", "{}")):
            text = head.format(kind) + section.format(source, args)
            (folder / "rows.yaml").write_text(text)
            told += check_files(load_recipe(folder / "rows.yaml"))
    assert [line.split(":")[0].removesuffix(".source") for line in told] == [
        *["sft.phases.0"] * 2,
        *["preference"] * 2,
    ]
    assert all("No such file or directory: 'gone.jsonl'" in line for line in told[::2])
    assert all("gave no rows" in line for line in told[1::2])


COMPANIONS = {
    "reference": ("objective.kl={kl_ctl: 0.1}",),
    "teacher": ("objective.kind=opd",),
    "critic": ("objective.kind=ppo",),
}


@pytest.mark.parametrize("name", COMPANIONS)
def test_a_model_beside_the_policy_must_be_there_whole_and_of_the_same_vocabulary(folder, name):
    def told(path):
        return check_files(recipe_of(folder, *COMPANIONS[name], f"{name}={{path: {path}}}"))

    (folder / "model/config.json").write_text(json.dumps({"vocab_size": 300}))
    other = folder / "other"
    other.mkdir()
    (line,) = told("other")
    assert line.startswith(f"{name}.path: ")
    assert "is no checkpoint folder here" in line
    (other / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 299}}))
    lines = told("other")
    assert "holds no .safetensors file" in lines[0]
    assert "has a vocabulary of 299 tokens; must be 300" in lines[1]
    (other / "model.safetensors").write_bytes(NO_TENSORS)
    (other / "config.json").write_text(json.dumps({"vocab_size": 300}))
    assert told("other") == []  # no tokenizer is asked of it
    if name != "teacher":
        assert told("null") == []


def test_a_reward_model_is_looked_for_before_anything_starts(folder):
    def told(path):
        args = f"reward.args={{path: {path}}}"
        score = "reward.score=areal_ray.engines.reward_model:score"
        return check_files(recipe_of(folder, score, args))

    (line,) = told("./judge")
    assert line.startswith("reward.args.path: './judge' is no checkpoint folder here")
    header = json.dumps({"score.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})
    whole = len(header).to_bytes(8, "little") + header.encode() + bytes(4)
    (folder / "model/model.safetensors").write_bytes(whole)
    assert told("./model") == []
    (folder / "model/model.safetensors").write_bytes(whole.replace(b"score", b"other"))
    (line,) = told("model")  # the policy's own start is none
    assert "so every score would be 0; must be a reward model" in line
    (folder / "model/model.safetensors").write_bytes(whole[:9])
    assert "cannot be read" in told("./model")[-1]


TOKENS = {"a": 0, "b": 1, "</s>": 2}
UNIGRAM = [["a", -1.0], ["b", -2.0]]


@pytest.mark.parametrize(
    ("tokenizer", "size", "must"),
    [
        ({"model": {"vocab": TOKENS}}, 300, None),
        ({"model": {"vocab": TOKENS}}, 320, None),  # an embedding padded further
        ({"model": {"vocab": TOKENS}}, 280, "must be at least 300"),
        ({"model": {"vocab": TOKENS}, "added_tokens": [{"id": 3, "content": "x"}]}, 320, None),
        ({"model": {"vocab": UNIGRAM}, "added_tokens": [{"id": 2, "content": "</s>"}]}, 300, None),
        ({"model": {"vocab": {"b": 0, "a": 1}}}, 300, "reads token 0 as 'b', not 'a'"),
        (
            {"model": {"vocab": TOKENS}, "added_tokens": [{"id": 2, "content": "<end>"}]},
            320,
            "reads token 2 as '<end>', not '</s>'",
        ),
        ({"model": 1}, 320, "must be 300"),  # tells nothing
    ],
)
def test_a_model_beside_the_policy_reads_its_token_ids_alike(folder, tokenizer, size, must):
    (folder / "model/config.json").write_text(json.dumps({"vocab_size": 300}))
    (folder / "model/tokenizer.json").write_text(json.dumps({"model": {"vocab": TOKENS}}))
    other = folder / "other"
    other.mkdir()
    (other / "model.safetensors").write_bytes(NO_TENSORS)
    (other / "config.json").write_text(json.dumps({"vocab_size": size}))
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    told = check_files(recipe_of(folder, "objective.kind=opd", "teacher={path: other}"))
    assert len(told) == (must is not None), told
    assert must is None or must in told[0]


@pytest.mark.parametrize(
    ("architecture", "overrides", "told"),
    [
        ("qwen3", ["learner.ranks=2"], "num_key_value_heads 1; must divide it"),
        ("gpt2", ["learner.ranks=2"], "no plan for models of type gpt2; must be 1"),
        ("llama", ["learner.ranks=2", "model.lora={rank: 2}"], "2 with model.lora; must be 1"),
    ],
)
def test_ranks_that_cannot_split_the_model_are_told(folder, architecture, overrides, told):
    how = {"num_key_value_heads": 1} if architecture == "qwen3" else {}
    write_tiny_model(folder / "split", architecture, **how)
    split = ["model.path=split", "learner.engine={kind: fsdp, tensor_parallel: 2}", *overrides]
    (line,) = check_files(recipe_of(folder, *split))
    assert line.startswith("learner.engine.tensor_parallel: ")
    assert told in line


def test_ranks_that_cannot_share_the_rows_of_a_model_are_told(folder):
    write_tiny_model(folder / "split", "gpt2")  # needs no plan, and its heads divide by 2
    adapters = ["model.lora={rank: 2}"]
    how = ["model.path=split", "learner.ranks=4", "learner.engine.kind=fsdp"]
    assert not check_files(recipe_of(folder, *how, *adapters, "learner.engine.sequence_parallel=2"))
    (line,) = check_files(recipe_of(folder, *how, "learner.engine.sequence_parallel=4"))
    assert line.startswith("learner.engine.sequence_parallel: is 4")
    assert "num_attention_heads 2; must divide it" in line
