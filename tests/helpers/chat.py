"""A copy of a model with a chat template, and files of conversations."""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# Each message is a line with its role, its content and the end token; what is asked of tools and thinking is shown.
TEMPLATE = """{%- if tools %}<|tools|>{{ tools | map(attribute="name") | join(",") }}
{% endif %}{% for message in messages %}<|{{ message.role }}|>
{{ message.content }}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% if enable_thinking is defined and not enable_thinking %}(no thoughts){% endif %}{% endif %}"""


def with_template(model: Path, folder: Path, template: str = TEMPLATE) -> Path:
    """Return a copy of a model with a chat template."""
    copy = Path(shutil.copytree(model, folder))
    (copy / "chat_template.jinja").write_text(template)
    return copy


def talk(*turns: str, **columns: Any) -> dict[str, Any]:
    """Return a record of `messages`: questions and answers, one after the other."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[index % 2], "content": turn} for index, turn in enumerate(turns)], **columns}


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> str:
    """Write records as JSON lines, and return the name of the file."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)
