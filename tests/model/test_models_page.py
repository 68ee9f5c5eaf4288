"""docs/models.md and docs/quantisation.md match the code."""

import pytest

from quire.model.checkpoint import loader
from quire.model.config import ModelError
from quire.model.families import FAMILIES, UNSUPPORTED
from quire.tests.support import formats_table, models_table


def test_models_page_is_up_to_date():
    assert models_table.PAGE.read_text() == models_table.page()


def test_every_model_type_is_tested():
    """By a tiny model, a published config, or the text model of one."""
    tested = {
        *models_table.by_kind(models_table.TINY_CONFIGS),
        *models_table.by_kind(models_table.PUBLISHED_CONFIGS),
    }
    assert {*FAMILIES} - tested <= {
        models_table.OWN,
        "gemma4_unified",
        "gemma4_unified_text",
        "deepseek_v3",
        "qwen3_5",
    }


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_unsupported_models_report_the_reason(kind):
    with pytest.raises(ModelError, match="is not supported") as caught:
        loader.family_for({"model_type": kind})
    assert UNSUPPORTED[kind] in str(caught.value)


def test_format_tables_are_up_to_date():
    """Tables of docs/quantisation.md: formats, and conversion of published checkpoints."""
    text = formats_table.PAGE.read_text()
    assert formats_table.page(text) == text
