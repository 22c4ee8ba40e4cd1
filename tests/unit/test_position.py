from hypothesis import given
from hypothesis import strategies as st

from allstep.data.position import DataPosition

STEPS = st.integers(1, 20)


@given(steps_per_epoch=STEPS, taken=st.integers(0, 100))
def test_advancing_step_by_step_equals_jumping(steps_per_epoch, taken):
    position = DataPosition()
    for _ in range(taken):
        position = position.advanced(steps_per_epoch)
    assert position == DataPosition.after(taken, steps_per_epoch)


@given(steps_per_epoch=STEPS, taken=st.integers(0, 100))
def test_a_position_tells_how_many_steps_were_taken_and_lies_within_its_epoch(steps_per_epoch, taken):
    position = DataPosition.after(taken, steps_per_epoch)
    assert position.epoch * steps_per_epoch + position.step == taken
    assert 0 <= position.step < steps_per_epoch


def test_the_last_step_of_an_epoch_leads_to_the_first_of_the_next():
    assert DataPosition(epoch=2, step=4).advanced(5) == DataPosition(epoch=3, step=0)
    assert DataPosition(epoch=2, step=3).advanced(5) == DataPosition(epoch=2, step=4)
