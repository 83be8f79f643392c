"""Options: fields of frozen dataclasses, from which cyclopts makes command lines.

    class EngineOptions(Options):
        block_size: Positive = 16
        \"\"\"Number of tokens in a KV block.\"\"\"

An option is written once, as a field. The field's type defines the allowed values, and the field's
docstring is the help text. The values are checked whenever an object is made.
`docs/reference/options.md` and the chart's options are generated from the same fields (`make
options`).
"""

import math
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import reduce
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from cyclopts import (
    App,
    Argument,
    ArgumentCollection,
    CycloptsError,
    Group,
    MissingArgumentError,
    Parameter,
    Token,
    UnusedCliTokensError,
)

from tandem.common.units import format_size, format_time, parse_size, parse_time
from tandem.errors import ConfigError

T = TypeVar("T")

_OPTIONS = Group("Options", sort_key=0)
_SHORT_TEXT = 100  # characters; a short help shows only the first sentence of a longer text
# Caches of `arguments` and `_limits`: class of settings -> result. Without them, each object of a
# class would cost 10 ms. (mypy does not accept functools.cache with classes as arguments.)
_arguments: dict[type[Any], tuple[Argument, ...]] = {}
_limits_of: dict[type[Any], dict[str, tuple[tuple[str, ...], "Bounds"]]] = {}


@dataclass(frozen=True, slots=True)
class Bounds:
    """The allowed range of a number, or the pattern of a text."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    pattern: str | None = None  # a regular expression that must match the whole text

    def fault(self, value: Any) -> str:
        """Returns the condition that the value violates; "" if it violates no condition."""
        # NaN is refused, because `not value >= least` is true for NaN.
        if self.least is not None and not value >= self.least:
            return f"be at least {self.least}"
        if self.above is not None and not value > self.above:
            return f"be above {self.above}"
        if self.most is not None and not value <= self.most:
            return f"be at most {self.most}"
        if self.pattern is not None and not re.fullmatch(self.pattern, value):
            return f"match the regular expression {self.pattern}"
        return "be a finite number" if value in (math.inf, -math.inf) else ""


def option_name(field_name: str) -> str:
    """Returns the name of a field's option, without the unit: `itl_target_s` gives itl-target. The
    help text has the unit."""
    return field_name.removesuffix("_s").replace("_", "-")


def by_comma(metavar: str, convert: Callable[[str], Any]) -> Parameter:
    """Returns the cyclopts parameter of an option whose value is a comma-separated list. `convert`
    makes a tuple or a mapping from the text."""

    def converter(_: object, tokens: Sequence[Token]) -> Any:
        return convert(tokens[-1].value)

    return Parameter(
        metavar=metavar,
        converter=converter,
        n_tokens=1,
        accepts_keys=False,
        negative=(),
        show_default=False,
    )


def to_int(text: str) -> int:
    """Returns the whole number in a text. Raises ValueError with a message for users."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(f'"{text}" is not a whole number') from None


def with_unit(
    metavar: str, parse: Callable[[str], float | None], show: Callable[[Any], str]
) -> Parameter:
    """Returns the cyclopts parameter of a number that may have a unit."""

    def converter(_: object, tokens: Sequence[Token]) -> float | None:
        return parse(tokens[-1].value)

    return Parameter(
        metavar=metavar, converter=converter, n_tokens=1, accepts_keys=False, show_default=show
    )


def _number_or_none(_: object, tokens: Sequence[Token]) -> int | None:
    return to_int(tokens[-1].value) or None


Count = Annotated[int, Bounds(least=0)]
Positive = Annotated[int, Bounds(least=1)]
Port = Annotated[int, Bounds(least=0, most=65535)]
Text = Annotated[str, Parameter(show_default=False)]
Name = Annotated[Text, Bounds(pattern="[A-Za-z0-9._-]*")]
NotNegative = Annotated[float, Bounds(least=0)]
_SIZE = with_unit("SIZE", parse_size, format_size)
TIME = with_unit("TIME", parse_time, format_time)
Size = Annotated[int, Bounds(least=0), _SIZE]  # bytes
PositiveSize = Annotated[int, Bounds(least=1), _SIZE]  # bytes
Seconds = Annotated[float, Bounds(least=0), TIME]
PositiveSeconds = Annotated[float, Bounds(above=0), TIME]
# 0 on the command line means None.
PositiveOrNone = Annotated[
    int | None, Bounds(least=1), Parameter(converter=_number_or_none, show_default=lambda _: "0")
]
# Bytes. 0 on the command line means None.
SizeOrNone = Annotated[
    int | None,
    Bounds(least=1),
    with_unit("SIZE", lambda text: parse_size(text) or None, lambda size: format_size(size or 0)),
]
Switch = Annotated[bool, Parameter(negative=())]
ConfigFile = Annotated[
    Text,
    Parameter(
        metavar="FILE",
        help="YAML file with options, such as `model: smollm2`. Variables such as TANDEM_MODEL set "
        "options, too. Order: command line, variables, file.",
    ),
]
Constant = Annotated[T, Parameter(parse=False)]  # a setting without an option


@dataclass(frozen=True, slots=True)
class Options:
    """Base class of all settings. Each value is checked against its type at construction."""

    def __post_init__(self) -> None:
        for field_name, (words, limits) in _limits(type(self)).items():
            value = getattr(self, field_name)
            if words and value not in words:
                fault = f"be one of {', '.join(words)}"
            else:
                fault = "" if value is None else limits.fault(value)
            if fault:
                shown = repr(value) if isinstance(value, str) else f"{value:g}"
                name = _name_of(type(self), field_name)
                raise ConfigError(f"{name} is {shown}; it must {fault}")
        self.check_together()

    def check_together(self) -> None:
        """Raises ConfigError if values are valid separately but not together."""


def read(made: type[T], program: str, argv: Sequence[str] | None = None) -> T:
    """Returns the settings of a command line. A wrong command line ends the process with status 2
    and one line on stderr."""
    try:
        return parse(made, program, sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        print(f"{program}: {error.message}", file=sys.stderr)
        raise SystemExit(2) from None


def parse(made: type[T], program: str, argv: Sequence[str]) -> T:
    """Returns the settings of a command line. Raises ConfigError, or SystemExit after --help."""
    settings: T = parse_app(make_app(made, program), argv)
    return settings


def parse_app(app: App, argv: Sequence[str]) -> Any:
    """Returns the settings that an app of `make_app` reads from `argv`. Raises ConfigError, or
    SystemExit after --help."""
    # For cyclopts, --help is a command, so it has to come first. People write it anywhere.
    if asked := [word for word in argv if word in ("--help", "-h")]:
        argv = asked[:1]
    try:
        command, bound, _ = app.parse_args(argv, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise ConfigError(_explained(one_line(error))) from None
    settings = command(*bound.args, **bound.kwargs)
    if settings is None:  # the command was --help
        raise SystemExit(0)
    return settings


def _explained(text: str) -> str:
    """Replaces the text of an error about an option that other engines have, and Tandem lacks."""
    if "--pipeline-parallel" in text:
        return (
            "pipeline parallelism (each device has only some layers) is not supported; "
            "use --tensor-parallel, which divides each layer among the processes of a worker"
        )
    return text


def extended(settings: Options, made: type[T], **more: object) -> T:
    """Returns an object of the subclass `made` with the values of `settings` and of `more`."""
    return made(**{f.name: getattr(settings, f.name) for f in fields(settings)} | more)


def to_argv(
    settings: Options, *, without: Collection[str] = (), with_defaults: bool = False
) -> list[str]:
    """Returns a command line that results in equal settings. Options at their defaults are left
    out unless `with_defaults` is True, and so are those in `without`, such as "--port"."""
    line: list[str] = []
    for argument in arguments(type(settings)):
        value = setting(settings, argument)
        is_kept = argument.parse and argument.name not in without
        if is_kept and (with_defaults or value != argument.field_info.default):
            if isinstance(value, bool):
                line.append(argument.name if value else argument.negatives[0])
            else:
                line += [argument.name, to_text(value)]
    return line


def setting(settings: object, argument: Argument) -> Any:
    """Returns the value of an option, which may be in a nested object of the settings."""
    return reduce(getattr, argument.keys, settings)


def to_text(value: Any) -> str:
    """Returns the value as it is written on a command line."""
    if isinstance(value, Mapping):
        value = [f"{key}={entry}" for key, entry in value.items()]
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return "0" if value is None else str(value)


def make_app(made: type[Any], program: str = "", *, has_file: bool = False) -> App:
    """Returns the cyclopts app that reads a class's settings. The docstring of the class is its
    description. With `has_file`, there is also the option --config.

    If the class has a SHORT_HELP, --help shows these options, and --help-all shows all of them.
    """
    table = getattr(made, "SHORT_HELP", None)
    if table is None:
        return _make_app(made, program, has_file, "--help", "-h")

    def show_short_help() -> None:
        """Show the options that people use most, and exit."""
        short = _make_app(made, program, has_file, "--help", "-h")
        short.short_help = table
        short.command(show_short_help, name="--help-all", help=all_, group=_OPTIONS)
        short.help_print([])

    all_ = "Show all options, and exit."
    app = _make_app(made, program, has_file, "--help-all")
    app["--help-all"].help = all_
    app.command(show_short_help, name=("--help", "-h"), group=_OPTIONS)
    return app


class _App(App):
    """The app of `make_app`. It joins the lines of the docstrings that are help texts."""

    # title of a group -> names of the options in it, if the help shows only some options
    short_help: Mapping[str, tuple[str, ...]] | None = None

    def assemble_argument_collection(
        self, *, parse_docstring: bool = False, **more: Any
    ) -> ArgumentCollection:
        found = super().assemble_argument_collection(parse_docstring=parse_docstring, **more)
        if not parse_docstring:  # a command line is read, which needs no help texts
            return found
        for argument in found:
            _set(argument, help=" ".join((argument.parameter.help or "").split()))
        if self.short_help is None:
            return found
        shown = []
        for place, (title, names) in enumerate(self.short_help.items()):
            for name in filter(found.__contains__, names):
                text = found[name].parameter.help or ""
                text = text if len(text) <= _SHORT_TEXT else text.partition(". ")[0] + "."
                _set(found[name], help=text, group=Group(title, sort_key=place))
                shown.append(found[name])
        return ArgumentCollection(shown)  # type: ignore[no-untyped-call]


def _set(argument: Argument, **more: Any) -> None:
    argument.parameter = Parameter.combine(argument.parameter, Parameter(**more))


def _make_app(made: type[Any], program: str, has_file: bool, *help_flags: str) -> _App:
    def collect(settings: Any) -> Any:
        return settings or made()

    def collect_with_file(settings: Any, *, config: str = "") -> Any:
        return settings or made()

    collector: Any = collect_with_file if has_file else collect
    types: dict[str, Any] = {"config": ConfigFile} if has_file else {}
    collector.__annotations__ = {"settings": Annotated[made, Parameter(name="*")], **types}
    if all(f.default is not MISSING or f.default_factory is not MISSING for f in fields(made)):
        collector.__annotations__["settings"] = Annotated[made | None, Parameter(name="*")]
        collector.__defaults__ = (None,)
    app = _App(
        name=program or made.__name__,
        help=made.__doc__,
        help_format="plaintext",
        help_flags=help_flags,
        usage=getattr(made, "USAGE", None),
        version_flags=(),
        group_parameters=_OPTIONS,
        # If an option is repeated, its last value is used, as on most command lines.
        default_parameter=Parameter(name_transform=option_name, allow_repeating=True),
    )
    app.default(collector)
    app[help_flags[0]].group = _OPTIONS
    return app


def arguments(made: type[Any]) -> tuple[Argument, ...]:
    """Returns all settings of a class, including nested ones. Constants have `parse` False."""
    if made not in _arguments:
        found = make_app(made).assemble_argument_collection(parse_docstring=False)
        _arguments[made] = tuple(a for a in found if a.name != "*")
    return _arguments[made]


def choices(argument: Argument) -> tuple[str, ...]:
    """Returns the allowed words; empty if the option is not a choice."""
    return _words(argument.hint)


def bounds(argument: Argument) -> Bounds:
    """Returns the allowed range or pattern of a setting."""
    return _bounds(argument.field_info.annotation)


def _limits(made: type[Any]) -> dict[str, tuple[tuple[str, ...], Bounds]]:
    """Returns field name -> (allowed words, bounds) of the fields that have either.

    Each process makes about ten objects of settings at its start. So this function reads the type
    hints, which takes a tenth of the time of `arguments`.
    """
    if made in _limits_of:
        return _limits_of[made]
    limits = _limits_of[made] = {}
    for name, hint in get_type_hints(made, include_extras=True).items():
        bare = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        if (found := (_words(bare), _bounds(hint))) != ((), Bounds()):
            limits[name] = found
    return limits


def _words(hint: Any) -> tuple[str, ...]:
    return get_args(hint) if get_origin(hint) is Literal else ()


def _bounds(annotation: Any) -> Bounds:
    found = get_args(annotation)[1:]
    return next((bound for bound in found if isinstance(bound, Bounds)), Bounds())


def _name_of(made: type[Any], field_name: str) -> str:
    """Returns the name of a field's option without the leading "--"."""
    found = next(a for a in arguments(made) if a.keys == (field_name,))
    return found.name.removeprefix("--")


def one_line(error: CycloptsError) -> str:
    """Returns one line that describes a wrong command line."""
    if isinstance(error, UnusedCliTokensError):
        extra = " ".join(error.unused_tokens or ())
        return f"unexpected argument {extra!r}; see --help for the allowed arguments and options"
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        if error.keyword:
            return f"{error.keyword} requires an argument"
        missing = [a for a in error.argument.children_recursive if a.required]
        names = ", ".join(map(_shown_name, missing or [error.argument]))
        return f"{names} must be given; see --help"
    return " ".join(str(error).split())


def _shown_name(argument: Argument) -> str:
    """Returns the name as the usage line shows it: ADDRESS for an argument that may be given
    without its option, otherwise --token-file."""
    is_positional = argument.index is not None
    return argument.name.lstrip("-").upper() if is_positional else argument.name
