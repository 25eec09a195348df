"""The prefix cache as a client sees it: cached tokens in usage, /v1/cache, and the same text warm as cold."""

from pathlib import Path

import pytest

from tests.laws import THREE_KINDS, sampled
from tests.serving import chat_body, serving_app

WORDS = "The quick brown fox jumps over the lazy dog and reads the file again. "


@pytest.mark.parametrize("family", sampled((*THREE_KINDS, "gpt_oss", "glm4_moe_lite"), ("qwen3_5",)))
def test_a_conversation_is_prefilled_once(tmp_path: Path, family: str) -> None:
    """The second turn reuses the first one up to the template's own change; cleared, the text is the same."""
    with serving_app(tmp_path, family=family) as app:
        system = {"role": "system", "content": WORDS * 12}
        first = [system, {"role": "user", "content": "List the files." + WORDS}]
        answer = app.chat(first, enable_thinking=False)
        assert answer.num_cached_tokens == 0 and answer.usage is not None
        second = [
            *first,
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": "Now count the lines."},
        ]
        # As the template writes it, without the tokens that the model emitted: those go when everything is cleared.
        warm = app.chat(second, enable_thinking=False, cache_mode="prefix")
        assert warm.num_cached_tokens is not None
        # A model with states starts from before the generation tail, which is up to 11 tokens long.
        assert warm.num_cached_tokens >= answer.usage["prompt_tokens"] - 16
        app.clear_cache()
        cold = app.chat(second, enable_thinking=False, cache_mode="prefix")
        assert cold.num_cached_tokens == 0
        assert (cold.content, cold.reasoning) == (warm.content, warm.reasoning)


def test_the_report_adds_up(tmp_path: Path) -> None:
    """Totals are the sums of the requests' usage; clearing empties what is held and keeps the totals."""
    with serving_app(tmp_path) as app:
        app.clear_cache()
        before = app.get("/v1/cache").json
        usages = [app.post("/v1/chat/completions", chat_body(WORDS * n)).json["usage"] for n in (3, 3, 5)]
        report = app.get("/v1/cache").json
        num_prompt = sum(usage["prompt_tokens"] for usage in usages)
        num_cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        assert num_cached > 0
        assert report["num_prompt_tokens"] - before["num_prompt_tokens"] == num_prompt
        assert report["num_cached_tokens"] - before["num_cached_tokens"] == num_cached
        assert report["num_prefill_tokens"] - before["num_prefill_tokens"] == num_prompt - num_cached
        assert report["ram_bytes"] > 0 and report["num_segments"] > 0
        assert set(report["counters"]) == {"vlm_retreat", "hybrid_trim_miss", "exact_key_rejected_by_model_lcp"}
        app.clear_cache()
        emptied = app.get("/v1/cache").json
        assert (emptied["ram_bytes"], emptied["num_segments"], emptied["num_entries"]) == (0, 0, 0)
        assert emptied["num_prompt_tokens"] == report["num_prompt_tokens"]
