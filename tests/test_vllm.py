"""examples/vllm_server.py against a stub with vLLM's interface: what it is asked, what its samples weigh."""

import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from conftest import NATS, load_script, read
from transformers import AutoModelForCausalLM

FEW = {"MAX_NEW_TOKENS": 24, "BATCH_SIZE": 2, "GROUP_SIZE": 4, "MAX_STEPS": 2, "MAX_EVAL_PROMPTS": 2}


def length(prompts, responses, answers):
    return [len(response) for response in responses]


class Stub(BaseHTTPRequestHandler):
    """Samples with the trainer's own generate(), and says its tokens were likelier by `shift`."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))
        answer = {}
        if self.path == "/collective_rpc":
            self.server.model = AutoModelForCausalLM.from_pretrained(body["kwargs"]["weights_path"])
        elif self.path == "/v1/completions":
            answer = {"choices": self.respond(**body)}
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def respond(self, prompt, n, max_tokens, temperature, stop_token_ids, **_):
        seeded = torch.Generator().manual_seed(sum(prompt))  # threads come in any order
        uniform = torch.rand(n, max_tokens, generator=seeded) if temperature else None
        ends = torch.tensor(stop_token_ids)
        with self.server.lock, torch.no_grad():
            ids, lengths, logprobs, _ = self.server.script.generate(
                self.server.model, [prompt], uniform, n, max_tokens, temperature or 1.0, ends, 0
            )
        return [
            {
                "token_ids": row[:length].tolist(),
                "logprobs": {"token_logprobs": (own[:length] + self.server.shift).tolist()},
            }
            for row, length, own in zip(ids, lengths, logprobs)
        ]

    def log_message(self, *_):
        pass


@pytest.fixture
def served(example, tmp_path, monkeypatch):
    """served(shift, KEY=value, ...): the module after a small run, its trainer, what the server was asked."""
    servers = []

    def run(shift=0.0, **constants):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
        servers.append(server)
        server.shift, server.asked, server.lock = shift, [], threading.Lock()
        server.script = load_script("grpo/grpo.py", BATCH_SIZE=2, GROUP_SIZE=4)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("VLLM_URL", f"http://127.0.0.1:{server.server_port}")
        out = str(tmp_path / f"run{len(servers)}")
        module = example("vllm_server", **{**FEW, "OUTPUT_DIR": out, **constants})
        trainer = module.VLLMTrainer()
        trainer.train()
        return module, trainer, server.asked

    yield run
    for server in servers:
        server.shutdown()
        server.server_close()


def steps_of(module):
    return [r for r in read(f"{module.grpo.OUTPUT_DIR}/logs/metrics.jsonl") if r["phase"] == "train"]


def test_the_server_has_each_steps_weights_and_every_prompt_its_request(served):
    module, trainer, asked = served()
    paths = [path for path, _ in asked]
    # the weights before the first evaluation, after each update; one request a prompt: 2 held out, twice; 2
    assert paths.count("/collective_rpc") == 3 == paths.count("/reset_prefix_cache")
    assert paths[:2] == ["/collective_rpc", "/reset_prefix_cache"]
    assert (
        paths[-6:] == ["/collective_rpc", "/reset_prefix_cache"] + ["/v1/completions"] * 4
    )  # the last step's
    bodies = [body for path, body in asked if path == "/v1/completions"]
    assert len(bodies) == 4 + 2 + 2 + 4
    assert [body["temperature"] for body in bodies] == [0.0, 0.0] + [1.0] * 6 + [0.0, 0.0] + [1.0] * 2
    assert all(body["top_k"] == -1 and body["top_p"] == 1 and body["return_token_ids"] for body in bodies)
    # the stub read the folder: its samples are on policy at each step only if it was given the new weights
    for step in steps_of(module):
        assert abs(step["sampler_kl"]) < NATS**2
        assert step["grad_norm"] > 0 or step["zero_variance_groups"] == 1
    weights = AutoModelForCausalLM.from_pretrained(f"{module.grpo.OUTPUT_DIR}/served").state_dict()
    assert all(torch.equal(value, weights[key]) for key, value in trainer.actor.state_dict().items())


def test_tokens_that_the_server_found_less_likely_weigh_more_up_to_the_cap(served):
    """Of a server whose log-probabilities are off by a constant: min(exp(-shift), 2), and KL by hand."""
    gradients = []
    for shift in (math.log(1.5), -math.log(3.0)):
        module, _, _ = served(
            shift, MAX_STEPS=1, MAX_GRAD_NORM=1e9, REWARD_FUNCTIONS=[(length, 1.0)], EVAL_DATASETS=[]
        )
        (step,) = steps_of(module)
        gradients.append(step["grad_norm"])
        assert step["sampler_kl"] == pytest.approx(math.exp(-shift) - 1 + shift, abs=NATS)
        assert step["first_ratio_deviation"] < 1e-2  # the policy's own ratio begins at 1 all the same
    assert gradients[0] > 0 and gradients[1] / gradients[0] == pytest.approx(2 * 1.5, rel=1e-3)


def test_without_a_server_one_sentence_says_so(example, monkeypatch):
    monkeypatch.setenv("VLLM_URL", "http://127.0.0.1:9")
    module = example("vllm_server")
    script = module.grpo
    with pytest.raises(script.UserError, match="VLLM_URL = http://127.0.0.1:9: no server answers"):
        module.VLLMTrainer().train()
    script.LORA_RANK = 4
    with pytest.raises(script.UserError, match="LORA_RANK = 0"):
        module.VLLMTrainer()
