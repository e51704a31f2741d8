"""Tools by their JSON schemas: the policy calls Python functions (GRPO, on top of turns.py).

Overrides reply() of turns.py: calls in the form of Hermes and Qwen, <tool_call>{"name": ..., "arguments":
...}</tool_call>, are run and answered in the role `tool`. A call that fails is answered by its error, so the
policy can learn from it. load_models() hands the schemas of TOOLS, which transformers makes of types and
docstrings, to the chat template.

Change: TOOLS, MAX_TURNS; for another form of calls the pattern in reply(). MAX_PROMPT_TOKENS must hold the
schemas, and MAX_NEW_TOKENS a whole conversation with its answers.

It needs a model whose chat template renders tools, and refuses others (the shipped one, too). It was tested
on the shipped model with such a template; no model has been trained with it yet.

    python examples/schema_tools.py ACTOR_MODEL=Qwen/Qwen2.5-0.5B-Instruct DTYPE=bfloat16 LEARNING_RATE=1e-6 \
        MAX_PROMPT_TOKENS=512 MAX_NEW_TOKENS=512                        # needs a GPU
"""

import functools
import json
import re

from transformers.utils import get_json_schema
from turns import TurnsTrainer, grpo


def multiply(a: int, b: int):
    """The product of two whole numbers.

    Args:
        a: the first
        b: the second
    """
    return a * b


TOOLS = {"multiply": multiply}


def run_tool(call):
    """Returns the answer to a call: its tool's value, or what is wrong with the call."""
    try:
        request = json.loads(call)
        return json.dumps(TOOLS[request["name"]](**request["arguments"]))
    except Exception as error:
        return f"Error: {type(error).__name__}: {error}"


class ToolTrainer(TurnsTrainer):
    role = "tool"

    def reply(self, row, text):
        calls = re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)
        return "\n".join(map(run_tool, calls)) or None

    def load_models(self, checkpoint):
        super().load_models(checkpoint)
        schemas = [get_json_schema(tool) for tool in TOOLS.values()]
        template = functools.partial(self.tokenizer.apply_chat_template, tools=schemas)
        self.tokenizer.apply_chat_template = template
        shown = template([{"role": "user", "content": "question"}], tokenize=False)
        if not all(name in shown for name in TOOLS):
            raise grpo.UserError("the chat template of ACTOR_MODEL does not render tools")


if __name__ == "__main__":
    grpo.GRPOTrainer = ToolTrainer
    grpo.OUTPUT_DIR = f"{grpo.ROOT}/checkpoints/schema_tools"
    grpo.train_main()
