"""Tools by their JSON schemas: the policy calls Python functions (GRPO with turns).

Shows how functions with types and a docstring are handed to the chat template, as the models of the hub know
it (`apply_chat_template(tools=...)`). Calls in the form of Hermes and Qwen, <tool_call>{"name": ...,
"arguments": ...}</tool_call>, are run and answered as the role `tool`. A call that fails is answered by its
error, so the policy can learn from it.

Change: TOOLS; for another form of calls the pattern in run_tools(). Prompts grow by the schemas:
MAX_PROMPT_TOKENS and MAX_CONTEXT_TOKENS must hold them. Tools that wait want ENVIRONMENT_THREADS. A reward
that counts calls takes the parameter `turns`.

It needs a model whose template renders tools, and refuses others at the start (the shipped one, too). The
templates of Qwen2.5, Qwen3 and Qwen3-VL know this form of calls. Tested on the shipped model with such a
template; no model has been trained with it yet.

    python examples/schema_tools.py ACTOR_MODEL=Qwen/Qwen2.5-0.5B-Instruct DTYPE=bfloat16 LEARNING_RATE=1e-6 \
        MAX_PROMPT_TOKENS=512 MAX_NEW_TOKENS=256 MAX_CONTEXT_TOKENS=2048                        # needs a GPU
"""

import functools
import json
import re
import sys
from pathlib import Path

from transformers.utils import get_json_schema

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "grpo"))
import grpo


def multiply(a: int, b: int):
    """The product of two whole numbers.

    Args:
        a: the first
        b: the second
    """
    return a * b


TOOLS = [multiply]


def answered(call):
    """Returns what a call is answered: its tool's value, or what is wrong with the call."""
    try:
        asked = json.loads(call)
        named = {tool.__name__: tool for tool in TOOLS}
        if asked["name"] not in named:
            return f"Error: there is no tool {asked['name']!r}; there are {', '.join(named)}"
        value = named[asked["name"]](**asked["arguments"])
        text = value if isinstance(value, str) else json.dumps(value)
        return text or "(no output)"
    except Exception as error:
        return f"Error: {type(error).__name__}: {error}"


def run_tools(messages, response, answer):
    """Returns answers to a response's calls, one line each; None, the end, for a response without a call."""
    calls = re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", response, re.DOTALL)
    return "\n".join(answered(call) for call in calls) or None


class ToolTrainer(grpo.GRPOTrainer):
    def load_models(self):
        super().load_models()
        schemas = [get_json_schema(tool) for tool in TOOLS]
        plain = self.tokenizer.apply_chat_template
        self.tokenizer.apply_chat_template = functools.partial(plain, tools=schemas)
        shown = grpo.apply_chat_template(self.tokenizer, [{"role": "user", "content": "?"}], "TOOLS", True)
        for name in [tool.__name__ for tool in TOOLS if tool.__name__ not in shown]:
            fault = f"does not show the tool {name}: take a model whose template renders tools"
            raise grpo.UserError(f"ACTOR_MODEL = {grpo.ACTOR_MODEL!r}: its chat template {fault}")


grpo.ENVIRONMENT = run_tools
grpo.ENVIRONMENT_ROLE = "tool"
grpo.OUTPUT_DIR = f"{grpo.ROOT}/checkpoints/schema_tools"

if __name__ == "__main__":
    grpo.run_main(ToolTrainer)
