"""Help pages: plain text in sections, so that `--help` needs no rich and answers at once."""

from typing import Any

from typer.core import TyperCommand

CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class SectionedCommand(TyperCommand):
    """A command whose options are listed under the section that each names as its `rich_help_panel`."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then plain options, then the other sections in the order of their first option."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                default = "Arguments" if param.param_type_name == "argument" else "Options"
                section = getattr(param, "rich_help_panel", None) or default
                sections.setdefault(section, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
