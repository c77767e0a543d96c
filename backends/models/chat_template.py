"""Chat templates, rendered so that the result says which of its characters the template wrote itself.

The template sees the real texts and does with them what it likes. What it writes are its own literals, the special
tokens that it is given by name (``bos_token``), and the roles that every client may name; all else is a client's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from string import Formatter
from typing import Any

from jinja2 import TemplateError, meta, nodes, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import do_indent, do_join
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

from backends.models.traced_text import TracedText, joined, own_of, own_text, traced

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""Templates make turn markers of these (``'<|' + role + '|>'``): as a message's role they count as the template's."""


class TemplateRefusal(ValueError):
    """The template doesn't take these messages; the text is the template's own words."""


class RenderedTooLong(ValueError):
    """The rendered text came over the bound; its size is ``size`` at least."""

    def __init__(self, size: int) -> None:
        super().__init__(f"the chat's size is at least {size}")
        self.size = size


class ChatTemplate:
    """A compiled template. ``names``: special tokens by the names under which templates know them.

    Raises :class:`TemplateRefusal` for what is no template.
    """

    def __init__(self, source: str, names: Mapping[str, Any]) -> None:
        # What transformers gives templates (raise_exception, tojson, {% generation %} ...) is taken over from it.
        from transformers.utils.chat_template_utils import _compile_jinja_template  # pyright: ignore

        try:
            theirs = _compile_jinja_template(source).environment
        except TemplateError as error:
            raise TemplateRefusal(str(error)) from error
        environment = _Environment(
            trim_blocks=theirs.trim_blocks,
            lstrip_blocks=theirs.lstrip_blocks,
            extensions=[type(each) for each in theirs.extensions.values()],
        )
        environment.filters.update(theirs.filters)
        environment.filters.update(join=_join, indent=_indent)
        environment.globals.update(theirs.globals)
        self._names = traced(dict(names), own=True)
        self._template = environment.from_string(source)
        self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        """The names that the template reads."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        size_of: Callable[[str], int] = len,
        most: int | None = None,
    ) -> TracedText:
        """``messages`` and ``variables`` (a client's) at any depth. A list of messages is not read to its end once the
        text's size is over ``most``.

        Raises :class:`TemplateRefusal` for whatever goes wrong in the template, and :class:`RenderedTooLong`.
        """
        given = {
            **self._names,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **traced(dict(variables), own=False),
            "messages": [_message(each) for each in messages],
        }
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.root_render_func(self._template.new_context(given)):
                parts.append(part)
                if most is not None and (size := size + size_of(part)) > most:
                    raise RenderedTooLong(size)
        except (RenderedTooLong, MemoryError):
            raise
        except Exception as error:
            # A template is a program that the model's author wrote for messages of a certain shape. That it falls
            # over these is the same news as its own raise_exception.
            words = str(error).replace(TracedText.__name__, "str")
            raise TemplateRefusal(words or type(error).__name__) from error
        return joined(parts)


def _message(message: Mapping[str, Any]) -> dict[Any, Any]:
    """As transformers shows it to templates: a field that is None is left out."""
    read = traced({key: value for key, value in message.items() if value is not None}, own=False)
    if read.get("role") in ROLES:
        read["role"] = own_text(str.__str__(read["role"]))
    return read


class _Generator(CodeGenerator):
    """Writes a template's literals as the template's own text."""

    def _output_const_repr(self, group: Any) -> str:
        return f"environment.own({''.join(group)!r})"

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, (str, list, tuple, dict)):
            self.write(f"environment.own({value!r})")
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        self.write(f"environment.own({node.data!r})")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("concat(map(str, (")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write(")))")


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _Generator
    concat = staticmethod(joined)  # pyright: ignore

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._literals: dict[str, TracedText] = {}

    def own(self, value: Any) -> Any:
        if not isinstance(value, str):
            return traced(value, own=True)
        # As many as the source has literals.
        if (found := self._literals.get(value)) is None:
            found = self._literals[value] = own_text(value)
        return found

    def wrap_str_format(self, value: Any) -> Any:
        plain = super().wrap_str_format(value)
        text = getattr(value, "__self__", None)
        if plain is None or not isinstance(text, TracedText) or own_of(text) != ((0, len(text)),):
            return plain

        def formatted(*args: Any, **kwargs: Any) -> str:
            # First as ever: this one knows what is forbidden and what is wrong.
            whole = plain(*args, **kwargs)
            if value.__name__ == "format_map":
                args, kwargs = (), args[0]
            found = _formatted(SandboxedFormatter(self), text, args, kwargs)
            return found if found == whole else whole

        return formatted


def _formatted(formatter: Formatter, text: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TracedText:
    parts: list[str] = []
    numbered = 0
    for literal, name, spec, conversion in formatter.parse(str.__str__(text)):
        parts.append(own_text(literal))
        if name is None:
            continue
        if name == "":
            name, numbered = str(numbered), numbered + 1
        value, _ = formatter.get_field(name, args, kwargs)
        value = formatter.convert_field(value, conversion)  # pyright: ignore
        parts.append(value if isinstance(value, TracedText) and not spec else format(value, str.__str__(spec or "")))
    return joined(parts)


@pass_eval_context
def _join(context: Any, value: Any, d: Any = "", attribute: Any = None) -> Any:
    # Jinja's own default is a plain text, which would forget whose the parts are.
    return do_join(context, value, TracedText(d, own_of(d)) if isinstance(d, str) else d, attribute)


def _indent(s: Any, width: Any = 4, first: bool = False, blank: bool = False) -> Any:
    # The line break that Jinja puts between the lines is a plain text: it joins them, and would forget whose they are.
    found = do_indent(s, width, first, blank)
    if not isinstance(s, TracedText):
        return found
    between = own_text(width if isinstance(width, str) else " " * width)
    lines = (s + "\n").splitlines()
    kept = [between + line if (line or blank) and i else line for i, line in enumerate(lines)]
    text = own_text("\n").join(kept)
    text = between + text if first else text
    return text if text == found else found
