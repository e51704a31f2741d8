"""A judge over HTTP: another model grades each response (GRPO).

Shows a reward function that waits for a server: it asks about many responses at once, in threads, and keeps
their order. The server speaks OpenAI's protocol (vLLM, SGLang, llama.cpp, a provider). A call that fails is
tried three times; then the run ends, and can be resumed.

Change: JUDGE_URL, JUDGE_MODEL and JUDGE_KEY in the environment; the question ASK; how a grade is read.

    vllm serve Qwen/Qwen2.5-7B-Instruct --served-model-name judge          # on a GPU, for example
    JUDGE_URL=http://127.0.0.1:8000/v1/chat/completions python examples/judge.py MAX_EVAL_PROMPTS=20
"""

import json
import os
import re
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "grpo"))
import grpo

URL = os.environ.get("JUDGE_URL", "http://127.0.0.1:8000/v1/chat/completions")
MODEL = os.environ.get("JUDGE_MODEL", "judge")
HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ.get("JUDGE_KEY", "")}
ASK = """Question: {}
Response: {}
Reference answer: {}
Grade the response from 0 to 10. Write a number only."""
WAITS = [0, 1, 4]  # seconds before each try
THREADS = 32  # calls at a time


def ask(text):
    """Returns the text of the judge's reply."""
    messages = [{"role": "user", "content": text}]
    body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 8}
    request = urllib.request.Request(URL, json.dumps(body).encode(), HEADERS)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


def grade(prompt, response, answer):
    """Returns the judge's grade of one response, 0 to 1; a reply without a number is 0."""
    for wait in WAITS:
        time.sleep(wait)
        try:
            found = re.search(r"\d+", ask(ASK.format(prompt, response, answer)))
            return min(10, int(found[0])) / 10 if found else 0.0
        # No reply, or a wrong one
        except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
            fault = error
    raise grpo.UserError(f"JUDGE_URL = {URL}: no judge replies ({fault}); start a server, then go on")


def judge(prompts, responses, answers):
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(grade, prompts, responses, answers))


grpo.REWARD_FUNCTIONS = [(judge, 1.0)]
grpo.OUTPUT_DIR = f"{grpo.ROOT}/checkpoints/judge"

if __name__ == "__main__":
    grpo.train_main()
