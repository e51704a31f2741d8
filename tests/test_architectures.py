"""grpo.py with other architectures: equal to a plain forward pass, or refused in a sentence."""

import pytest
from architectures import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, NOT_BUILT, TOLERANCE, examine, names

CORE = {
    "llama": "equal",
    "qwen2": "equal",
    "qwen3": "equal",
    "gpt2": "equal",
    "mistral+window": "equal",
    "gemma2+window": "equal",
    "opt": "equal",  # its layers apply their dropout themselves
    "deepseek_v3": "equal",  # changes what the cache returned before attention reads it
    "qwen3_next": "equal",
    "lfm2": "equal",  # states beside keys and values
    "mamba": "refused",  # its states take padding in
    "phimoe+window": "equal",  # a window that only the mask knows
    "afmoe": "equal",  # passes attention_mask by its name
    "doge+window": "equal",  # the same
    "mixtral+router logits": "equal",
    "bert": "refused",  # sees what comes after
}


def check(name, folder, expected=("equal", "refused")):
    result = examine(name, folder)
    assert result.outcome in expected, f"{result.outcome}: {result.sentence} {result.errors}"
    if result.outcome == "equal":
        assert result.error < TOLERANCE and not result.notes, result
        assert {"sampler", "scorer", "first ratio", "gradient"} <= set(result.errors), result
    else:
        assert len(result.sentence.split()) > 5, result
    return result


@pytest.mark.parametrize("name", CORE)
def test_an_architecture_is_sampled_and_scored_as_a_plain_pass_does_or_refused(tmp_path, name):
    check(name, tmp_path, (CORE[name],))


def pytest_generate_tests(metafunc):
    """Importing every config takes seconds: only who asks for the sweep pays them."""
    if "any_name" in metafunc.fixturenames:
        left_out = "not sweep" in metafunc.config.getoption("markexpr")
        metafunc.parametrize("any_name", ["llama"] if left_out else names())


@pytest.mark.sweep
def test_every_architecture_is_equal_or_refused(tmp_path, any_name):
    if any_name in NOT_BUILT:
        pytest.skip(NOT_BUILT[any_name])
    check(any_name, tmp_path)


def test_the_sweep_reaches_the_architectures():
    assert len(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(NOT_BUILT)) >= 134


def test_the_sweep_sees_a_scorer_that_is_a_token_late(tmp_path, monkeypatch):
    """The harness can fail: what a bug does shows in its errors."""
    import architectures

    script = architectures.grpo()
    score = script.response_logprobs

    def late(*arguments):
        return tuple(x.roll(1, 1) for x in score(*arguments))

    monkeypatch.setattr(script, "response_logprobs", late)
    result = examine("llama", tmp_path)
    assert result.outcome != "equal" and not result.error < 1, result
