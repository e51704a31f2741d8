"""Mutants of which constant is handed where, and of data, splits, seeds and schedules; first those that an
audit of the machinery planted and that lived. The program that plants them is mutants.py."""

PPO, GRPO, RCE = "ppo/ppo.py", "grpo/grpo.py", "rce/rce.py"
IN_GRPO = "tests/test_grpo.py::test_"
IN_MODELS = "tests/test_models.py::test_"
IN_PPO = "tests/test_ppo.py::test_"
IN_RCE = "tests/test_rce.py::test_"
IN_SHOW = "tests/test_show.py::test_"
IN_TURNS = "tests/test_turns.py::test_"

MUTANTS = [
    # what the audit planted
    (PPO, '"log_ratio": log_ratio.abs()}', '"log_ratio": log_ratio}',
     IN_MODELS + "in_bfloat16_a_first_update_that_sees_other_probabilities_ends_the_run[ppo]"),
    (GRPO, "- batch.sampled_logprobs[micro, :width]).abs()", "- batch.sampled_logprobs[micro, :width])",
     IN_MODELS + "in_bfloat16_a_first_update_that_sees_other_probabilities_ends_the_run[grpo]"),
    (GRPO, "- batch.sampled_logprobs[micro, :width]).abs()", "- batch.logprobs[micro, :width]).abs()",
     IN_MODELS + "gspos_rescored_probabilities_do_not_hide_a_wrong_sampler"),
    (PPO, "torch.cat([some[key] for some in parts])", "torch.cat([some[key] for some in parts[::-1]])",
     IN_PPO + "parts_of_several_calls_stay_beside_their_responses"),
    (GRPO, "scores, parts = dealt_rewards(score, BATCH_SIZE * GROUP_SIZE,",
     "scores, parts = dealt_rewards(score, BATCH_SIZE,",
     IN_GRPO + "rewards_are_asked_about_whole_groups"),
    (RCE, "scores, parts = dealt_rewards(score, BATCH_SIZE * GROUP_SIZE,",
     "scores, parts = dealt_rewards(score, BATCH_SIZE,",
     IN_RCE + "rewards_are_asked_about_batch_size_prompts_candidates_at_a_time"),
    (PPO, "scores, parts = dealt_rewards(score, BATCH_SIZE * GROUP_SIZE,",
     "scores, parts = dealt_rewards(score, BATCH_SIZE,",
     IN_PPO + "parts_of_several_calls_stay_beside_their_responses"),
    (GRPO, '**({"REWARD_MODEL": trainer.reward_model} if trainer.reward_model else {})', "",
     IN_TURNS + "what_turns_cannot_do_is_refused_at_the_start"),
    (PPO, "            for _ in range(GROUP_EPOCHS):\n"
     "                rows = (torch.randperm if MINI_BATCHES > 1 else torch.arange)(len(batch.rows))\n",
     "            rows = (torch.randperm if MINI_BATCHES > 1 else torch.arange)(len(batch.rows))\n"
     "            for _ in range(GROUP_EPOCHS):\n",
     IN_PPO + "mini_batches_share_out_every_row_once"),
    (GRPO, 'sum(m["role"] == "assistant" for m in response.messages)', "len(response.messages)",
     IN_TURNS + "turns_are_the_policys_own"),
    (GRPO, 'if sample["step"] == int(step)]', 'if sample["step"] >= int(step)]',
     IN_SHOW + "a_step_and_the_worst_or_best_can_be_asked_for"),
]
