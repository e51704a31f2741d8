"""A judge over HTTP: another model grades each response (GRPO).

Adds ("judge", judge, 0.2) to the rewards that the constants name. Asks an OpenAI-like server (vLLM, SGLang,
llama.cpp, a provider) about many responses at once. The judge needs memory of its own: another GPU, another
machine, or a provider. A call that fails is tried three times; then the run ends, and can be resumed.

Change: JUDGE_URL, JUDGE_MODEL, JUDGE_KEY in the environment; the question ASK; the tokens of a reply in
OPTIONS, which also hold a judge's thoughts; the weight at the end. Tested with vLLM 0.32 on a CPU.

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
from urllib.error import HTTPError

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "grpo"))
import grpo

URL = os.environ.get("JUDGE_URL", "http://127.0.0.1:8000/v1/chat/completions")
HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ.get("JUDGE_KEY", "")}
# Some servers want max_completion_tokens and no temperature
OPTIONS = {"model": os.environ.get("JUDGE_MODEL", "judge"), "temperature": 0, "max_tokens": 1024}
ASK = """Question: {}
Response: {}
Reference answer: {}
Grade the response from 0 to 10. End with the grade, a number only."""
TIMEOUT = 300  # seconds for a reply: a busy server lets calls wait
WAITS = [0, 1, 4]  # seconds before each try


def ask(text):
    body = {**OPTIONS, "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(URL, json.dumps(body).encode(), HEADERS)
    with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
        return json.load(reply)["choices"][0]["message"]["content"] or ""


def grade(prompt, response, answer):
    """Returns the judge's grade, 0 to 1: the last number of its reply, or 0 if there is none."""
    for wait in WAITS:
        time.sleep(wait)
        try:
            reply = re.sub(r"(/|of) ?10\b", "", ask(ASK.format(prompt, response, answer)))  # of "7/10"
            return min(10.0, float(re.findall(r"\d+(?:\.\d+)?", "0 " + reply)[-1])) / 10
        except HTTPError as error:
            fault = f"{error}: {' '.join(error.read().decode(errors='replace').split()):.150}"
        except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
            fault = error  # no reply, or one of another form
    raise grpo.UserError(f"JUDGE_URL = {URL}: no judge replies ({fault}); start a server, then go on")


def judge(prompts, responses, answers):
    with ThreadPoolExecutor(max_workers=32) as pool:  # calls at a time
        return list(pool.map(grade, prompts, responses, answers))


class JudgeTrainer(grpo.GRPOTrainer):
    def __init__(self, resume_from_checkpoint=None):
        super().__init__(resume_from_checkpoint)  # reads the constants
        self.reward_functions.append(("judge", judge, 0.2))


grpo.GRPOTrainer = JudgeTrainer
grpo.OUTPUT_DIR = f"{grpo.ROOT}/checkpoints/judge"

if __name__ == "__main__":
    grpo.train_main()
