"""The operators' page of a real cluster, in a real browser."""

from __future__ import annotations

from tests.harness.browser import opened
from tests.harness.cluster import LocalCluster


def test_a_chat_is_sent_with_enter_and_explained_by_the_page(cluster: LocalCluster) -> None:
    with opened(cluster.admin_url) as page:
        page.click("#open-chat")  # the focus is on the message
        page.keyboard.press("Control+A")
        page.keyboard.type("What is gravity? " + "Explain it with many examples. " * 20)
        page.fill("#tokens-max", "4")
        page.focus("#message")
        page.keyboard.press("Enter")
        page.wait_for_selector("#answers .ending")
        ending = page.inner_text("#answers .ending")
        assert "The answer was cut at its token limit (finish_reason: length)." in ending
        assert "First token after" in ending
        assert len(page.query_selector_all("#answers p")) == 5, (
            "two speakers, two texts, the ending"
        )
        page.keyboard.press("Escape")
        page.wait_for_selector("#chat-drawer", state="hidden")
        assert page.evaluate("document.activeElement.id") == "open-chat"
        # The cluster has also answered completions of other tests.
        chat = "#requests li:has-text('chat'):has-text('ended at its token limit')"
        item = page.wait_for_selector(chat)
        told = item.inner_text()
        assert "Longest: " in told
        assert "First token after" in told
        assert "Prompt on prefill-0, tokens on decode-0, which pulled" in told
        assert "decode-0 was the only decode worker to choose from." in told
        page.wait_for_selector("[data-answer=minute]:has-text('1 ended; none failed')")
        assert "First tokens" in page.inner_text("[data-answer=slow]")
        assert "free (total: " in page.inner_text("[data-answer=kv]")
        assert "Room for KV" in page.inner_text("[data-answer=more_decode]")
