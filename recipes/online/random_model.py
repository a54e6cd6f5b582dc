"""The calculator's model, untrained, with room for what agents send and a template with tools."""

from pathlib import Path

from areal_ray.engines.tiny_model import write_random_qwen3
from recipes.calculator.model import make_tokenizer

CONTEXT_TOKENS = 65536
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}\n"
    'Call one as <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments }}}'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def create(folder: Path, seed: int) -> None:
    """Write the checkpoint of `seed` into `folder`."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.model_max_length = CONTEXT_TOKENS
    write_random_qwen3(
        Path(folder),
        tokenizer,
        seed,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=96,
        max_position_embeddings=CONTEXT_TOKENS,
        initializer_range=0.08,
    )
