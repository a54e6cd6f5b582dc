"""What two sides of a publish lack of each other is told in full, and shortly."""

from areal_ray.core.weight_names import difference, folded


def test_equal_sides_have_no_difference_whatever_the_order() -> None:
    assert difference({"a": (1,), "b": ()}, {"b": (), "a": (1,)}) == ""


def test_every_kind_of_difference_is_told_at_once() -> None:
    sent = {"a": (2, 3), "only_sent": (1,), "same": (4,)}
    expected = {"a": (3, 2), "same": (4,), "x": (1,), "y": (1,)}
    assert difference(sent, expected) == (
        "2 tensors are expected but not sent: x, y; "
        "1 tensor is sent but not expected: only_sent; "
        "1 tensor is of another shape: a is sent as (2, 3), expected (3, 2)"
    )


def test_layers_are_told_as_one_name_with_their_numbers() -> None:
    layers = (0, 1, 2, 5, 7, 8)
    names = [f"model.layers.{i}.{part}" for i in layers for part in ("up.weight", "down.weight")]
    assert folded(["head", *names]) == [
        "head",
        "model.layers.{0-2,5,7-8}.up.weight",
        "model.layers.{0-2,5,7-8}.down.weight",
    ]
    assert folded(["model.layers.3.up"]) == ["model.layers.3.up"]


def test_the_second_number_of_a_name_is_part_of_it() -> None:
    assert folded(["l.0.experts.0", "l.1.experts.0", "l.0.experts.1"]) == [
        "l.{0-1}.experts.0",
        "l.0.experts.1",
    ]


def test_a_whole_other_model_is_told_in_a_few_lines() -> None:
    expected = {f"model.layers.{i}.{part}": (8, 8) for i in range(99) for part in "abc"}
    told = difference({f"decoder.{i}": (8, 8) for i in range(99)}, expected)
    assert told == (
        "297 tensors are expected but not sent: model.layers.{0-98}.a, model.layers.{0-98}.b, "
        "model.layers.{0-98}.c; 99 tensors are sent but not expected: decoder.{0-98}"
    )


def test_what_does_not_fold_is_counted_beyond_twelve() -> None:
    told = difference({}, {f"tensor_{chr(97 + i)}": () for i in range(20)})
    assert told.startswith("20 tensors are expected but not sent: tensor_a, tensor_b, ")
    assert told.endswith("tensor_l and 8 more")
