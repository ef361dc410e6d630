"""Tables in a terminal: what gives way where room is short, and that nothing is lost before it must be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from trine.analyzers.reports._grid import head_lines, row_lines, widths_of, wrap
from trine.analyzers.reports.document import Column, Table, with_content

COLUMNS = (
    Column("rank", "right"),
    Column("exposed communication", "right"),
    Column("at the peak", flexible=True),
)


def lines(columns: tuple[Column, ...], row: tuple[str, ...], width: int) -> list[str]:
    widths = widths_of(columns, [row], width)
    return [*head_lines(columns, widths), *row_lines(row, columns, widths)]


def test_with_room_everything_stands_on_one_line() -> None:
    found = lines(COLUMNS, ("3", "41 %", "activations 3 GiB"), 100)
    assert [" ".join(line.split()) for line in found] == [
        "rank exposed communication at the peak",
        "3 41 % activations 3 GiB",
    ]


def test_titles_take_several_lines_before_anything_is_cut() -> None:
    found = lines(COLUMNS, ("3", "41 %", "activations 3 GiB"), 42)
    assert [line.split() for line in found] == [
        ["exposed"],
        ["rank", "communication", "at", "the", "peak"],
        ["3", "41", "%", "activations", "3", "GiB"],
    ]
    assert (
        len(
            {
                line.rindex(word) + len(word)
                for line, word in ((found[0], "exposed"), (found[1], "communication"))
            }
        )
        == 1
    )


def test_a_sentence_in_the_last_column_goes_on_and_a_name_is_cut_in_its_middle() -> None:
    sentence = ("0", "1 %", "parameters 1.00 GiB, gradients 2.00 GiB, optimizer state 4.00 GiB")
    found = lines(COLUMNS, sentence, 50)
    assert " ".join(" ".join(found[2:]).split()) == " ".join(sentence)
    name = lines(COLUMNS, ("0", "1 %", "void_" + "k" * 60 + "_end"), 50)
    assert len(name) == 3 and "void_" in name[-1] and "…" in name[-1] and name[-1].endswith("_end")


def test_columns_in_which_nothing_is_known_are_left_out() -> None:
    table = Table(COLUMNS, (("–", "–", "a"), ("–", "", "b")))
    assert with_content(table).rows == (("–", "a"), ("–", "b"))
    assert with_content(Table(COLUMNS, ())).columns == COLUMNS
    whole = Table(COLUMNS, (("1", "2", "3"),))
    assert with_content(whole) is whole


words = st.text(alphabet="abc 漢,µ", max_size=60).map(lambda text: " ".join(text.split()))


@given(
    st.lists(st.tuples(words, st.sampled_from(["left", "right"]), st.booleans()), min_size=1, max_size=6),
    st.lists(words, min_size=6, max_size=6),
    st.integers(60, 100),
)
def test_no_line_is_wider_than_the_page(titles, cells, width: int) -> None:
    columns = tuple(Column(*title) for title in titles)
    for line in lines(columns, tuple(cells[: len(columns)]), width):
        assert cell_len(line) <= width


@given(words, st.integers(8, 40))
def test_wrapping_loses_no_word(text: str, width: int) -> None:
    found = wrap(text, width)
    assert "".join(found).replace(" ", "") == text.replace(" ", "")
    assert all(cell_len(line) <= width for line in found)
