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
    (
        PPO,
        "ids = to_device(pad_left(prompts, pad_id), model.device)",
        "ids = pad_left(prompts, pad_id)",
        TEST + "ppo",
    ),
    (
        PPO,
        "self.mask = (torch.arange(width, device=model.device) >= width - self.positions[:, None]).long()",
        "self.mask = (torch.arange(width) >= width - self.positions.cpu()[:, None]).long()",
        TEST + "ppo",
    ),
    ("ppo/ppo.py", "        scores = scores.to(self.device)\n", "", "tests/test_pretend_gpu.py::test_ppo"),
    (
        PPO,
        "max_response_length(batch, rows), device=logits.device)",
        "max_response_length(batch, rows))",
        TEST + "ppo",
    ),
    (
        PPO,
        "advantages = torch.zeros_like(values)\n",
        "advantages = torch.zeros(values.shape)\n",
        TEST + "ppo",
    ),
    (
        PPO,
        "return to_device(sorted({tokenizer.eos_token_id, *ends} - {None}), model.device)",
        "return torch.tensor(sorted({tokenizer.eos_token_id, *ends} - {None}))",
        TEST + "ppo",
    ),
    (
        PPO,
        "lengths = to_device(list(map(len, responses)), device)",
        "lengths = torch.tensor(list(map(len, responses)))",
        TEST + "ppo",
    ),
    (
        PPO,
        "load_reward_model(REWARD_MODEL, self.device)",
        'load_reward_model(REWARD_MODEL, torch.device("cpu"))',
        TEST + "ppo",
    ),
    (GRPO, "return scores.to(self.device) + OVERLONG", "return scores + OVERLONG", TEST + "grpo"),
    (
        RCE,
        "batch.weights = torch.tensor(row_weights, device=self.device)",
        "batch.weights = torch.tensor(row_weights)",
        TEST + "rce",
    ),
    (
        ICL,
        "self.policy.sample(*batch.inputs, uniform.to(self.device))",
        "self.policy.sample(*batch.inputs, uniform)",
        TEST + "rce_icl[0]",
    ),
    (
        REC,
        "self.item_at = self.paths[:, -1].argsort()",
        "self.item_at = self.paths[:, -1].argsort().cpu()",
        TEST + "grpo_rec",
    ),
    # random numbers
    (
        PPO,
        UNIFORM,
        "uniform = torch.rand(len(prompts) * GROUP_SIZE, MAX_NEW_TOKENS, device=self.device, "
        "generator=torch.Generator().manual_seed(1))\n",
        TEST + "ppo",
    ),
    (
        PPO,
        UNIFORM,
        "uniform = torch.rand(len(prompts) * GROUP_SIZE, MAX_NEW_TOKENS, device=self.device)\n",
        TEST + "ppo",
    ),
    (
        REC,
        "        tokenizer, model = small_model(len(catalogue.codes[0]))\n",
        "        tokenizer, model = small_model(len(catalogue.codes[0]))\n        model = model.to(device)\n",
        TEST + "grpo_rec",
    ),
    (
        ICL,
        '        state["cuda"] = torch.cuda.get_rng_state().tolist()\n',
        "        pass\n",
        TEST + "rce_icl[0.3]",
    ),
    (
        ICL,
        '        torch.cuda.set_rng_state(torch.ByteTensor(state["cuda"]))\n',
        "        pass\n",
        TEST + "rce_icl[0.3]",
    ),
    (RAG, "fork_rng(gpus)", "fork_rng()", TEST + "ppo_rag"),
    # kinds of numbers
    (
        PPO,
        "torch.autocast(model.device.type, torch.bfloat16)",
        'torch.autocast("cpu", torch.bfloat16)',
        TEST + "ppo_narrow",
    ),
    (
        "ppo/ppo.py",
        "            precision = autocast(model)\n",
        "            pass\n",
        "tests/test_pretend_gpu.py::test_ppo_narrow",
    ),
    # waits
    (
        "ppo/ppo.py",
        "if (t + 1) % check_every == 0 or is_last:",
        "if True:",
        "tests/test_pretend_gpu.py::test_how_often_the_host_waits[ppo]",
    ),
    (GRPO, "_EOS_CHECK_EVERY[device.type]", "8", TEST + "how_often_the_host_waits[grpo]"),
    (
        PPO,
        'non_blocking=torch.device(device).type == "cuda")',
        "non_blocking=False)",
        TEST + "how_often_the_host_waits[ppo]",
    ),
    (
        "ppo/ppo.py",
        "tree_unflatten(torch.stack(tensors).tolist()",
        "tree_unflatten([x.item() for x in tensors]",
        "tests/test_pretend_gpu.py::test_how_often_the_host_waits[ppo]",
    ),
    (
        PPO,
        "width = max_response_length(batch, micro)",
        "width = int(batch.response_lengths[micro].max())",
        TEST + "how_often_the_host_waits[ppo]",
    ),
    (
        "ppo/ppo.py",
        "            if is_last:\n                break\n",
        "",
        "tests/test_pretend_gpu.py::test_how_often_the_host_waits[ppo]",
    ),
    # kernels
    (PPO, "        if self.needs_mask:\n", "        if True:\n", TEST + "how_often_the_host_waits[ppo]"),
    (
        "grpo/grpo.py",
        "x.transpose(0, 1).index_select(1, self.row_of_slot)",
        "x.index_select(0, self.row_of_slot).transpose(0, 1)",
        "tests/test_pretend_gpu.py::test_how_often_the_host_waits[grpo]",
    ),
    # what is patched
    (
        "ppo/ppo.py",
        "(memory.bit_length() - 1) // 16",
        "(memory.bit_length() - 1) // 8",
        "tests/test_pretend_gpu.py::test_cards_of_one_kind_cut_micro_batches_alike",
    ),
    (
        "ppo/ppo.py",
        "max_bytes = 2 ** (memory.bit_length() - 1) // 16",
        "max_bytes = memory // 16",
        "tests/test_pretend_gpu.py::test_cards_of_one_kind_cut_micro_batches_alike",
    ),
    (
        PPO,
        """name = f"cuda:{os.environ['LOCAL_RANK']}\"""",
        'name = "cuda:0"',
        TEST + "each_process_takes_its_own_gpu_and_gradients_meet_by_nccl",
    ),
    (
        PPO,
        'backend = "cpu:gloo,cuda:nccl" if',
        'backend = "gloo" if',
        TEST + "each_process_takes_its_own_gpu_and_gradients_meet_by_nccl",
    ),
    (
        PPO,
        "        torch.cuda.set_device(device)\n",
        "        pass\n",
        TEST + "each_process_takes_its_own_gpu_and_gradients_meet_by_nccl",
    ),
    (
        PPO,
        'non_blocking=torch.device(device).type == "cuda")',
        "non_blocking=True)",
        TEST + "only_a_gpu_of_cuda_gets_copies_that_do_not_block",
    ),
]
