"""The picture of pages over time shows every state that its legend names, and requests that share."""

from scripts.studies.pages_picture import FREE, KEPT, PAGES, SHARED, held, picture


def test_pages_are_free_kept_shared_or_of_a_request():
    found = held()
    assert found.shape[0] == PAGES and {FREE, KEPT, SHARED} < set(found.ravel().tolist())
    assert set(range(12)) <= set(found.ravel().tolist())
    assert (found[:, 0] == FREE).all()
    # A prefix of 96 tokens lies in six pages of 16.
    assert (found == SHARED).sum(0).max() >= 6
    assert picture(found).startswith(b"\x89PNG")
