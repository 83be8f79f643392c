"""One turn with OpenHands' agent: sends the argument. The folder KEPT has the conversation."""

from __future__ import annotations

import os
import sys
import uuid

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.file_editor import FileEditorTool
from pydantic import SecretStr

llm = LLM(
    model=f"openai/{os.environ['MODEL']}",
    base_url=os.environ["BASE_URL"],
    api_key=SecretStr("none"),
)
agent = Agent(llm=llm, tools=[Tool(name=FileEditorTool.name)])
conversation = Conversation(
    agent=agent,
    workspace=os.getcwd(),
    persistence_dir=os.environ["KEPT"],
    conversation_id=uuid.UUID(int=1),
)
conversation.send_message(sys.argv[1])
conversation.run()
