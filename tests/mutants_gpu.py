"""Bugs of devices, which a CPU does not show: found on the pretended GPU (pretend_gpu.py)."""
PPO = "ppo/ppo.py"
GRPO = "grpo/grpo.py"
RCE = "rce/rce.py"
RAG = "ppo/ppo_rag.py"
REC = "grpo/grpo_rec.py"
ICL = "rce/rce_icl.py"
TEST = "tests/test_pretend_gpu.py::test_"
UNIFORM = "uniform = torch.rand(len(prompts) * GROUP_SIZE, MAX_NEW_TOKENS)\n"
MUTANTS = [
    # left on the CPU
    (PPO, "ids = pad_left(prompts, pad_id).to(model.device)", "ids = pad_left(prompts, pad_id)",
     TEST + "ppo"),
    (PPO, "self.mask = (torch.arange(width, device=model.device) >= width - self.positions[:, None]).long()",
     "self.mask = (torch.arange(width) >= width - self.positions.cpu()[:, None]).long()", TEST + "ppo"),
    (PPO, "        return scores.to(self.device), parts\n", "        return scores, parts\n", TEST + "ppo"),
    (PPO, "zeros = torch.zeros(mask.shape, device=mask.device)\n", "zeros = torch.zeros(mask.shape)\n",
     TEST + "ppo"),
    (PPO, "advantages = torch.zeros_like(values)\n", "advantages = torch.zeros(values.shape)\n",
     TEST + "ppo"),
    (PPO, "in rows.to(self.device).chunk(MINI_BATCHES):", "in rows.chunk(MINI_BATCHES):", TEST + "ppo"),
    (PPO, "- {None}), device=model.device)", "- {None}))", TEST + "ppo"),
    (PPO, "load_reward_model(REWARD_MODEL, self.device)",
     'load_reward_model(REWARD_MODEL, torch.device("cpu"))', TEST + "ppo"),
    (PPO, 'optimizer.load_state_dict({**saved["optimizers"][name], "param_groups": groups})\n',
     'optimizer.load_state_dict({**saved["optimizers"][name], "param_groups": groups})\n'
     "                for some in optimizer.state.values():\n"
     "                    some.update({key: x.cpu() for key, x in some.items()})\n", TEST + "ppo"),
    (PPO, "batch.response_mask).item()\n        if self.ref",
     "batch.response_mask).numpy()\n        if self.ref", TEST + "ppo"),
    (GRPO, "return scores.to(self.device) + OVERLONG", "return scores + OVERLONG", TEST + "grpo"),
    (RCE, "batch.weights = torch.tensor(kept, device=self.device)",
     "batch.weights = torch.tensor(kept)", TEST + "rce"),
    (ICL, "self.policy.sample(*batch.inputs, uniform.to(self.device))",
     "self.policy.sample(*batch.inputs, uniform)",
     TEST + "rce_icl[0]"),
    (REC, "self.item_at = torch.zeros(len(codes), dtype=torch.long, device=device)",
     "self.item_at = torch.zeros(len(codes), dtype=torch.long)", TEST + "grpo_rec"),
    # random numbers
    (PPO, UNIFORM, "uniform = torch.rand(len(prompts) * GROUP_SIZE, MAX_NEW_TOKENS, device=self.device, "
     "generator=torch.Generator().manual_seed(1))\n", TEST + "ppo"),
    (PPO, UNIFORM, "uniform = torch.rand(len(prompts) * GROUP_SIZE, MAX_NEW_TOKENS, device=self.device)\n",
     TEST + "ppo"),
    (REC, "        tokenizer, model = small_model(len(catalogue.codes[0]))\n",
     "        tokenizer, model = small_model(len(catalogue.codes[0]))\n        model = model.to(device)\n",
     TEST + "grpo_rec"),
    (ICL, '        state["cuda"] = torch.cuda.get_rng_state().tolist()\n', "        pass\n",
     TEST + "rce_icl[0.3]"),
    (ICL, '        torch.cuda.set_rng_state(torch.ByteTensor(state["cuda"]))\n', "        pass\n",
     TEST + "rce_icl[0.3]"),
    (RAG, 'fork_rng([device] if device.type == "cuda" else [])', "fork_rng()", TEST + "ppo_rag"),
    # kinds of numbers
    (PPO, "torch.autocast(model.device.type, torch.bfloat16)", 'torch.autocast("cpu", torch.bfloat16)',
     TEST + "ppo_narrow"),
    (PPO, "autocast(model) if model.dtype != torch.float32 else nullcontext()", "nullcontext()",
     TEST + "ppo_narrow"),
    # waits
    (PPO, "int(unfinished.sum()) if t % _LOOK_EVERY.get(device.type, 16) == 0 else len(rows)",
     "int(unfinished.sum())", TEST + "how_often_the_host_waits[ppo]"),
    (GRPO, "int(unfinished.sum()) if t % _LOOK_EVERY.get(device.type, 16) == 0 else len(rows)",
     "int(unfinished.sum())", TEST + "how_often_the_host_waits[grpo]"),
]
