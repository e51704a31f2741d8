"""A judge over HTTP: another model grades each response.

Shows a reward function that waits for a server: rewards.threaded() calls it for many responses at once and
keeps their order. The server speaks OpenAI's protocol (vLLM, SGLang, llama.cpp, a provider); only the
standard library is used. A call that fails is tried three times; then the run ends with the server's error
and can be resumed.

Change: JUDGE_URL, JUDGE_MODEL and JUDGE_KEY in the environment; the question ASK; how a grade is read. At
most BATCH_SIZE * GROUP_SIZE calls are made for one batch, and MAX_EVAL_PROMPTS * EVAL_SAMPLES for an
evaluation. Resuming is exact only if the judge grades a response alike each time.

    vllm serve Qwen/Qwen2.5-7B-Instruct --served-model-name judge          # on a GPU, for example
    JUDGE_URL=http://127.0.0.1:8000/v1/chat/completions python examples/judge.py MAX_EVAL_PROMPTS=20
"""

import http.client
import json
import os
import re
import sys
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "grpo"))
import grpo

URL = os.environ.get("JUDGE_URL", "http://127.0.0.1:8000/v1/chat/completions")
MODEL = os.environ.get("JUDGE_MODEL", "judge")
HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ.get("JUDGE_KEY", "")}
ASK = "Question: {}\nResponse: {}\n{}Grade the response from 0 to 10. Write the number alone."
MAX_TOKENS = 8  # of a reply: its first number is the grade; a judge that thinks first needs another reading
# No connection, a timeout, a status such as 429 or 500; a reply cut short; one that is no JSON, or other JSON
FAULTS = (OSError, http.client.HTTPException, ValueError, LookupError, TypeError)


def question(prompt, response, answer):
    """Returns what the judge is asked. A prompt is a text or a chat; an answer a text, a list of them or
    None."""
    answers = [answer] if isinstance(answer, str) else answer or []
    reference = f"Reference answer: {' or '.join(answers)}\n" if answers else ""
    return ASK.format(grpo.as_text(prompt), response, reference)


def ask(text):
    """Returns the text of the judge's reply."""
    options = {"temperature": 0, "max_tokens": MAX_TOKENS}
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": text}], **options}).encode()
    with urllib.request.urlopen(urllib.request.Request(URL, body, HEADERS), timeout=60) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


def grade(*row):
    """Returns the judge's grade of one response, 0 to 1; a reply without a number is 0."""
    text = question(*row)
    for wait in (1, 4, None):
        try:
            found = re.search(r"\d+", ask(text))
        except FAULTS:
            if wait is None:
                raise
            time.sleep(wait)
        else:
            return min(10, int(found[0])) / 10 if found else 0.0


def judge(prompts, responses, answers):
    return [grade(*row) for row in zip(prompts, responses, answers)]


grpo.REWARD_FUNCTIONS = [(grpo.rewards.threaded(judge, threads=32), 1.0)]
grpo.OUTPUT_DIR = f"{grpo.ROOT}/checkpoints/judge"

if __name__ == "__main__":
    fault = hint = ""
    try:
        reply = ask(question("What is 1 + 1?", "2", "2"))
        if not re.search(r"\d", reply):
            fault, hint = f"replies without a number ({reply!r})", "change ASK or MAX_TOKENS"
    except FAULTS as error:
        fault, hint = f"no judge replies ({error})", "start a server, or set JUDGE_URL"
    if fault:
        print(f"judge.py: JUDGE_URL = {URL}: {fault}: {hint}", file=sys.stderr)
        sys.exit(2)
    grpo.train_main()
