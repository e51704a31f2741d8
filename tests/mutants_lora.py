"""Mutants of the adapters. The program that plants them is mutants.py."""

PPO, GRPO, RCE, REC = "ppo/ppo.py", "grpo/grpo.py", "rce/rce.py", "grpo/grpo_rec.py"
IN_LORA = "tests/test_lora.py::test_"
IN_PROCESSES = "tests/test_processes.py::test_"

MUTANTS = [
    # what is trained
    (
        "grpo/grpo.py",
        "    trained = [p for p in model.parameters() if p.requires_grad]",
        "    trained = list(model.parameters())",
        "tests/test_lora.py::test_the_adapter_alone_is_trained_in_float32_and_the_base_never_changes[grpo]",
    ),
    (
        "ppo/ppo.py",
        "        config.modules_to_save = heads",
        "        config.modules_to_save = None",
        "tests/test_lora.py::test_the_critics_head_is_trained_whole_and_saved",
    ),
    (
        GRPO,
        "            parameter.data = parameter.data.float()\n",
        "            pass\n",
        IN_LORA + "a_base_in_bfloat16_under_adapters_in_float32",
    ),
    (
        "grpo/grpo.py",
        "lora_alpha=LORA_ALPHA,",
        "lora_alpha=32.0,",
        "tests/test_lora.py::test_an_adapters_product_counts_alpha_over_rank",
    ),
    (
        "grpo/grpo.py",
        "lora_alpha=LORA_ALPHA,",
        "lora_alpha=LORA_ALPHA, use_rslora=True,",
        "tests/test_lora.py::test_an_adapters_product_counts_alpha_over_rank",
    ),
    (
        "grpo/grpo.py",
        "for model in models for p in model.parameters() if p.requires_grad]",
        "for model in models for p in model.parameters()]",
        "tests/test_lora.py::test_the_adapter_alone_is_trained_in_float32_and_the_base_never_changes[grpo]",
    ),
    # the reference
    (
        GRPO,
        "        model.enable_adapters()\n",
        "        pass\n",
        IN_LORA + "the_reference_is_the_base_to_the_bit_and_the_adapter_comes_back[grpo]",
    ),
    (
        "ppo/ppo.py",
        "with without_adapter(self.reference):",
        "if True:",
        "tests/test_lora.py::test_the_reference_is_the_base_to_the_bit_and_the_adapter_comes_back[ppo]",
    ),
    (
        GRPO,
        "KL_COEF > 0 and LORA_RANK and not REFERENCE_MODEL:",
        "KL_COEF > 0 and LORA_RANK:",
        IN_LORA + "a_reference_of_its_own_stays_a_model_of_its_own[grpo]",
    ),
    (
        "grpo/grpo_rec.py",
        "with without_adapter(self.reference):\n                    batch.ref_logprobs",
        "if True:\n                    batch.ref_logprobs",
        "tests/test_lora.py::test_recommendation_has_an_adapter_on_what_sft_taught",
    ),
    (
        "grpo/grpo.py",
        "with without_adapter(self.reference):",
        "if True:",
        "tests/test_lora.py::test_the_reference_is_the_base_to_the_bit_and_the_adapter_comes_back[grpo]",
    ),
    (
        PPO,
        "KL_COEF > 0 and LORA_RANK and not REFERENCE_MODEL:",
        "False:",
        IN_LORA + "the_reference_is_the_base_to_the_bit_and_the_adapter_comes_back[ppo]",
    ),
    # what is saved
    (
        "rce/rce.py",
        "    peft.set_peft_model_state_dict(model, state)\n",
        "",
        "tests/test_lora.py::test_six_steps_equal_three_and_three_to_the_byte[rce]",
    ),
    (
        GRPO,
        "copy.deepcopy(model).float()",
        "copy.deepcopy(model)",
        IN_LORA + "a_base_in_bfloat16_under_adapters_in_float32",
    ),
    (
        "grpo/grpo.py",
        "copy.deepcopy(model).float()",
        "model.float()",
        "tests/test_lora.py::test_best_is_merged_and_plain_and_nothing_is_merged_in_place[grpo]",
    ),
    (
        GRPO,
        "            layer.merge()\n",
        "",
        IN_LORA + "best_is_merged_and_plain_and_nothing_is_merged_in_place[grpo]",
    ),
    (
        "grpo/grpo.py",
        "policy = merge_adapter(policy)",
        "pass",
        "tests/test_lora.py::test_best_is_merged_and_plain_and_nothing_is_merged_in_place[grpo]",
    ),
    (
        "grpo/grpo.py",
        "    merged._hf_peft_config_loaded = False\n",
        "",
        "tests/test_lora.py::test_best_is_merged_and_plain_and_nothing_is_merged_in_place[grpo]",
    ),
    (
        GRPO,
        "config.target_modules = sorted(config.target_modules)",
        "pass",
        IN_LORA + "a_checkpoint_is_an_adapter_that_peft_loads_on_the_base_it_names[grpo]",
    ),
    (
        "grpo/grpo.py",
        "path = str(Path(path).resolve())",
        "pass",
        "tests/test_lora.py::test_a_folder_is_named_to_its_adapter_from_the_root",
    ),
    (
        "ppo/ppo.py",
        'config.task_type = "TOKEN_CLS"',
        "pass",
        "tests/test_lora.py::test_the_critics_head_is_trained_whole_and_saved",
    ),
    (
        GRPO,
        "lambda module, inputs: inputs[0].contiguous())",
        "lambda module, inputs: inputs[0])",
        IN_LORA + "a_frozen_head_reads_no_view_of_the_prompts",
    ),
    # what is refused
    (
        GRPO,
        '    if (Path(path) / "adapter_config.json").exists():',
        "    if False:",
        IN_LORA + "an_adapters_folder_is_no_model[grpo]",
    ),
    (
        GRPO,
        "    if is_sharded():\n        raise",
        "    if False:\n        raise",
        IN_LORA + "sharding_is_refused",
    ),
    (
        GRPO,
        "    if LORA_RANK and KL_COEF and REFERENCE_SYNC_STEPS:",
        "    if False:",
        IN_LORA + "what_cannot_be_done_right_is_refused[sync]",
    ),
    (
        "grpo/grpo.py",
        "(before.r, before.lora_alpha) == (config.r, config.lora_alpha)",
        "True",
        "tests/test_lora.py::test_a_resumed_run_needs_its_own_adapter[grpo-alpha]",
    ),
    # the check of a base in bfloat16
    # several processes
]
