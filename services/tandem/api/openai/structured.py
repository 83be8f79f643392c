"""Request fields for structured output: OpenAI's `response_format`, and the additional fields of
vLLM and SGLang."""

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tandem.api.openai.fields import CHAT_POLICY, FieldPolicy, each
from tandem.errors import BadRequest
from tandem.models.grammars.text import Kind, StructuredOutput
from tandem.router.request.allowed import ALLOWED, refusal

_Schema = dict[str, Any] | bool


class Strict(BaseModel):
    """A request body, or a part of one, that forbids unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid")

    # names of the fields as clients send them
    supported: ClassVar[frozenset[str]]
    # what happens to fields that the class does not have
    field_policy: ClassVar[FieldPolicy] = CHAT_POLICY
    # field name -> text about the allowed values, for error messages. Texts about fields that
    # several bodies share are in `_ALLOWED` of requests.py.
    allowed: ClassVar[Mapping[str, str]] = {}
    # field name -> class of the object in this field. Unknown fields are dropped from this object,
    # too.
    parts: ClassVar[Mapping[str, type["Strict"]]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.supported = frozenset(field.alias or name for name, field in cls.model_fields.items())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, sent: object) -> object:
        """Null means absent, as in OpenAI's API. JSON does not distinguish 2.0 from the integer 2,
        and clients whose numbers are all floats send the former."""
        if not isinstance(sent, dict):
            return sent
        return {
            name: int(value) if isinstance(value, float) and value.is_integer() else value
            for name, value in sent.items()
            if value is not None
        }

    @classmethod
    def leave_out(cls, body: dict[str, Any]) -> list[str]:
        """Removes from a body the parts that Tandem does not support and that an answer does not
        need, such as tools of the provider's servers. Returns their names. The body is not
        validated, so values of wrong types stay as they are."""
        return []


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False
    # an addition of vLLM; has no effect unless `include_usage` is true
    continuous_usage_stats: bool = False


class JsonSchema(Strict):
    """With `strict` true, keywords of the schema that are not supported are refused. By default
    they are ignored, as in OpenAI's API."""

    name: str = ""
    description: str | None = None
    schema_: _Schema = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    # clients of llama.cpp send the schema here, with the type "json_object" or "json_schema"
    schema_: _Schema | None = Field(None, alias="schema")

    def wanted(self) -> StructuredOutput | None:
        """Converts the format to a StructuredOutput. Returns None for plain text. Raises BadRequest
        if the fields do not match."""
        form = self.json_schema
        if form is None and self.schema_ is not None and self.type != "text":
            form = JsonSchema(schema=self.schema_)
        elif self.schema_ is not None or (self.type == "json_schema") != (form is not None):
            raise refusal("response_format")
        if self.type == "text":
            return None
        if form is None:
            return StructuredOutput("response_format", "json_object")
        lenient = form.strict is not True
        source = json.dumps(form.schema_)
        return StructuredOutput("response_format", "json_schema", source, lenient)


class StructuredOutputs(Strict):
    """vLLM's options of white space and of its compilers are hints."""

    model_config = ConfigDict(strict=True, extra="ignore")
    field_policy = FieldPolicy(
        hints=each(
            *("disable_any_whitespace", "disable_fallback", "disable_additional_properties"),
            "whitespace_pattern",
        )
    )

    json_: _Schema | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def wanted(self) -> StructuredOutput:
        """Converts the single field that is set to a StructuredOutput. Raises BadRequest if no
        field or more than one is set."""
        given = self.told()
        if len(given) != 1:
            raise refusal("structured_outputs")
        [(name, value)] = given.items()
        return _wanted("structured_outputs", name, value)

    def told(self) -> dict[str, Any]:
        """Returns the fields that are set."""
        sent = self.model_dump(by_alias=True)
        return {k: value for k, value in sent.items() if value is not None and value is not False}


# Top-level fields that request structured output -> kind of output. The fields `guided_...` are
# vLLM's, the next two SGLang's, and the last two llama.cpp's.
_FORMS = {
    **{f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")},
    "regex": "regex",
    "ebnf": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
}


class StructuredFields(Strict):
    """The fields that request structured output, of which a body may set at most one."""

    response_format: ResponseFormat | None = Field(None, description=ALLOWED["response_format"])
    structured_outputs: StructuredOutputs | None = Field(
        None, description=ALLOWED["structured_outputs"]
    )
    guided_json: dict[str, Any] | str | None = Field(None, description=ALLOWED["guided_json"])
    guided_regex: str | None = Field(None, description=ALLOWED["guided_regex"])
    guided_choice: list[str] | None = Field(None, description=ALLOWED["guided_choice"])
    guided_grammar: str | None = Field(None, description=ALLOWED["guided_grammar"])
    regex: str | None = Field(None, description=ALLOWED["regex"])
    ebnf: str | None = Field(None, description=ALLOWED["ebnf"])
    json_schema: dict[str, Any] | str | None = Field(None, description=ALLOWED["json_schema"])
    grammar: str | None = Field(None, description=ALLOWED["grammar"])

    def structured_output(self) -> StructuredOutput | None:
        """Returns the required form of the output, or None if any output is allowed. Raises
        BadRequest if more than one field requires a form."""
        named = [
            field.wanted() for field in (self.response_format, self.structured_outputs) if field
        ]
        for field, name in _FORMS.items():
            value = getattr(self, field)
            # Clients of llama.cpp send "" if they want no grammar.
            if value is not None and (field, value) != ("grammar", ""):
                named.append(_wanted(field, name, value))
        wanted = [form for form in named if form is not None]
        if len(wanted) > 1:
            fields = " and ".join(form.field for form in wanted)
            raise BadRequest(
                f"{fields} each set the format of the answer; send only one of them",
                param=wanted[1].field,
            )
        return wanted[0] if wanted else None


def _wanted(field: str, name: str, value: Any) -> StructuredOutput:
    if value in ("", []):
        raise refusal(field, why="empty")
    kind: Kind = "json_schema" if name == "json" else name  # type: ignore[assignment]
    if kind == "json_object":
        return StructuredOutput(field, kind)
    source = value if isinstance(value, str) else json.dumps(value)
    return StructuredOutput(field, kind, source)
