"""Streams a chat answer with OpenAI's own client (pip install openai).

python docs/examples/openai_client.py [URL]
"""

import sys

from openai import OpenAI


def main(url: str = "http://127.0.0.1:8000/v1") -> None:
    client = OpenAI(base_url=url, api_key="not needed")
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "What is gravity? Explain in two sentences."}],
        max_tokens=100,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage:
            cached = chunk.usage.prompt_tokens_details.cached_tokens
            print(f"\n[{chunk.usage.prompt_tokens} prompt tokens, {cached} of them cached]")


if __name__ == "__main__":
    main(*sys.argv[1:])
