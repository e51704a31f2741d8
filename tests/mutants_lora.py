"""Mutants of the adapters. The program that plants them is mutants.py."""

PPO, GRPO, RCE, REC = "ppo/ppo.py", "grpo/grpo.py", "rce/rce.py", "grpo/grpo_rec.py"
IN_LORA = "tests/test_lora.py::test_"

MUTANTS = [
    # what is trained
    (GRPO, "    trained = [p for p in model.parameters() if p.requires_grad]\n    return",
     "    trained = list(model.parameters())\n    return",
     IN_LORA + "the_adapter_alone_is_trained_in_float32_and_the_base_never_changes[grpo]"),
    (PPO, "modules_to_save=heads or None", "modules_to_save=None",
     IN_LORA + "the_critics_head_is_trained_whole_and_saved"),
    (GRPO, "            parameter.data = parameter.data.float()\n", "            pass\n",
     IN_LORA + "a_base_in_bfloat16_under_adapters_in_float32"),

    # the reference
    (GRPO, "            model.enable_adapters()\n", "            pass\n",
     IN_LORA + "the_reference_is_the_base_to_the_bit_and_the_adapter_comes_back[grpo]"),
    (PPO, "with without_adapter(self.reference):", "if True:",
     IN_LORA + "the_reference_is_the_base_to_the_bit_and_the_adapter_comes_back[ppo]"),
    (GRPO, "KL_COEF > 0 and LORA_RANK and not REFERENCE_MODEL:", "KL_COEF > 0 and LORA_RANK:",
     IN_LORA + "a_reference_of_its_own_stays_a_model_of_its_own[grpo]"),
    (REC, "with without_adapter(self.reference):", "if True:",
     IN_LORA + "recommendation_has_an_adapter_on_what_sft_taught"),

    # what is saved
    (RCE, "        x.copy_(state[name])", "        pass",
     IN_LORA + "six_steps_equal_three_and_three_to_the_byte[rce]"),
    (GRPO, "p for p in frozen if p.dtype == torch.float32}).float()", "p for p in frozen}).float()",
     IN_LORA + "a_base_in_bfloat16_under_adapters_in_float32"),
    (GRPO, "    copied = copy.deepcopy(model, {", "    copied = model\n    copy.deepcopy(model, {",
     IN_LORA + "best_is_merged_and_plain_and_nothing_is_merged_in_place[grpo]"),

    # what is refused
    (GRPO, 'ways.get("base_digest") != getattr(model, "base_digest", None)', "False",
     IN_LORA + "a_base_that_has_changed_under_its_adapter_is_told"),
    (GRPO, '(then["r"], then["lora_alpha"]) == (LORA_RANK, LORA_ALPHA)', "True",
     IN_LORA + "a_resumed_run_needs_its_own_adapter"),
    (GRPO, "held.count(id(layer.get_base_layer().weight)) > 1", "False",
     IN_LORA + "what_cannot_be_done_right_is_refused"),
    (GRPO, "        if absent:\n", "        if False:\n",
     IN_LORA + "what_cannot_be_done_right_is_refused"),

    # the check of a base in bfloat16
    (GRPO, "                parameter.data = parameter.data.to(dtype)", "                pass",
     IN_LORA + "the_check_of_a_model_in_bfloat16_is_in_float32_and_leaves_it_as_it_was"),
]
