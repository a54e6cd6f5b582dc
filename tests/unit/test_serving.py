"""What `areal-ray serve` makes of its words, and who may call without a key."""

import pytest

from areal_ray.errors import RecipeError
from areal_ray.gateway.upstream_config import UpstreamConfig
from areal_ray.gateway_access import GatewayAccess, access_key, gateway_problems
from areal_ray.serving import served_recipe


def test_a_model_and_keys_make_a_recipe_that_reads_back_the_same():
    recipe = served_recipe("inference", ["org/model=1", "rollout.replicas=2"])
    assert (recipe.kind, recipe.model.path, recipe.rollout.replicas) == (
        "inference",
        "org/model=1",
        2,
    )
    assert "kind: inference" in recipe.to_yaml()


@pytest.mark.parametrize("words", [[], ["rollout.replicas=2"]])
def test_without_a_model_it_says_so(words):
    with pytest.raises(RecipeError, match="MODEL_PATH is missing"):
        served_recipe("inference", words)


def test_a_recipe_of_another_kind_is_refused():
    with pytest.raises(RecipeError, match="must be online or inference"):
        served_recipe("recipes/calculator/grpo.yaml", [])


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_on_loopback_nobody_needs_a_key_if_told_so(host):
    recipe = served_recipe("inference", ["m", f"gateway.host='{host}'", "gateway.no_key=true"])
    assert access_key(recipe) == ""
    assert GatewayAccess(("http://u",)).lines() == "gateway    http://u"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "a.host"])
def test_beyond_loopback_it_does_not_serve_without_a_key(host):
    words = ["m", f"gateway.host='{host}'"]
    assert access_key(served_recipe("inference", words))
    with pytest.raises(RecipeError, match=r"gateway\.no_key.*must be false beyond loopback"):
        served_recipe("inference", [*words, "gateway.no_key=true"])


def test_the_environments_key_is_taken_and_not_told_again(monkeypatch):
    recipe = served_recipe("inference", ["m"])
    first, second = access_key(recipe), access_key(recipe)
    assert first != second
    monkeypatch.setenv("AREAL_RAY_API_KEY", "a-key-of-the-user-000")
    assert access_key(recipe) == "a-key-of-the-user-000"
    told = GatewayAccess(("http://u",), api_key=access_key(recipe))
    assert told.lines().splitlines()[1] == "api key    the one in AREAL_RAY_API_KEY"
    assert "a-key-of" not in repr(told)
    monkeypatch.setenv("AREAL_RAY_API_KEY", "short")
    assert any("AREAL_RAY_API_KEY" in problem for problem in gateway_problems(recipe))


@pytest.mark.parametrize(
    "url",
    ["", "ftp://h", "http://", "h/v1", "http://u:p@h", "http://h/?a", "http://h:x", "http://h/#"],
)
def test_a_providers_url_is_a_plain_one(url):
    with pytest.raises(ValueError, match="must be http"):
        UpstreamConfig(url=url, model="m")


def test_a_key_in_place_of_its_variable_is_not_repeated():
    with pytest.raises(ValueError, match="not the key itself") as error:
        UpstreamConfig(url="https://h/v1/", model="m", key_env="sk-secret")
    assert "is no name" in str(error.value)
