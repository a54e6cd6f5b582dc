"""What a run allows a call of a model."""

from dataclasses import dataclass

from areal_ray.gateway.call import Call, CallError


@dataclass(frozen=True, slots=True)
class CallLimits:
    """What the run allows a call."""

    max_new_tokens: int
    """Of one choice; also where a call names none. More is clamped."""
    context_tokens: int
    """Prompt and sampled tokens together."""
    max_choices: int = 16
    stop: tuple[str, ...] = ()
    """Texts that end every turn; a call may add others."""

    def check(self, call: Call, *, is_trained: bool) -> None:
        """Refuse what no turn can be sampled by.

        Raises:
            CallError: 400: too many choices, or a wish that no engine keeps; where the turn may
                train that is passed over, as all such wishes are.
        """
        if call.n > self.max_choices:
            told = f"n: is {call.n}; must be <= {self.max_choices}"
            raise CallError(400, "invalid_value", told, param="n")
        if call.unserved and not is_trained:
            name = call.unserved[0]
            told = f"{name}: is not served here. Leave it out"
            raise CallError(400, "invalid_value", told, param=name)
