"""docs/models.md says what the code does."""

import pytest

from quire.model.checkpoint import loader
from quire.model.config import ModelError
from quire.model.families import FAMILIES, UNSUPPORTED
from quire.tests.support import formats_table, models_table


def test_the_page_is_what_is_true():
    assert models_table.PAGE.read_text() == models_table.page()


def test_every_model_type_is_tested():
    """Each is that of a tiny model, of a published one, or of the model inside of one."""
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
def test_a_model_that_is_refused_says_why(kind):
    with pytest.raises(ModelError, match="is not supported") as caught:
        loader.family_for({"model_type": kind})
    assert UNSUPPORTED[kind] in str(caught.value)


def test_the_tables_of_formats_are_what_is_true():
    """docs/quantisation.md: what each format is, and what published checkpoints become."""
    text = formats_table.PAGE.read_text()
    assert formats_table.page(text) == text
