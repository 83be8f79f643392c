"""The text that an int4 pool's keys are calibrated by: prose, a chat, code, data and languages."""

# ruff: noqa: E501

TEXT = '''The harbour lies at the mouth of a slow river. In the morning the boats come in with the
tide, and by noon the market behind the old customs house is full of people who buy fish, bread and
oranges. Most of them have known each other for years. They ask after children and parents, complain
about the price of diesel, and stay longer than they meant to. In winter, when the wind comes from
the north-east, the square is empty, and only the two cafes keep their lights on until the evening.

A lighthouse was built here in 1863, after a ship with 214 passengers had run onto the rocks. Its
lamp could be seen at a distance of 18 miles. The keeper, a man named Thomas Aldridge, wrote down the
weather four times a day for thirty-one years. His notebooks, of which all but two survive, are today
a source for historians of the climate: they show that the mean temperature of the 1870s was about
1.2 degrees lower than that of the last decade, and that storms were as frequent as they are now.

How does a computer know what time it is? A small crystal of quartz swings 32,768 times a second. A
counter divides this number by two, fifteen times in a row, and so gets one pulse a second. The
crystal is not perfect. Heat, age and the voltage of the battery change its rate by some millionths,
which is a few seconds a week. Therefore the computer asks other computers from time to time. It sends
a message, notes when the answer comes, and assumes that both ways took equally long. If that is
false, for example because the network was busy in one direction only, its clock will be wrong by
half of the difference, and nothing that it can measure will tell.

User: I have three eggs, half an onion, some rice and a tin of tomatoes. What can I cook?
Assistant: You could make a simple shakshuka. Chop the onion and fry it gently in oil for about five
minutes. Add the tomatoes, salt, pepper and, if you have it, a little cumin or paprika. Let the sauce
simmer until it is thick, make three hollows in it, and break an egg into each. Put a lid on the pan
and wait until the whites are firm. Cook the rice beside it: one cup of rice, two cups of water.
User: Can I leave out the onion?
Assistant: Yes. Use a clove of garlic instead, or nothing at all; the sauce is then a little sharper.

def median(values: list[float]) -> float:
    """Returns the middle of the sorted values, or the mean of the two in the middle."""
    if not values:
        raise ValueError("the median of no values is not defined")
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2

{"id": 4711, "name": "Weather station 12", "position": {"lat": 52.5163, "lon": 13.3777},
 "readings": [{"time": "2024-03-01T06:00:00Z", "celsius": 3.4, "humidity": 0.87}, {"time":
 "2024-03-01T12:00:00Z", "celsius": 9.1, "humidity": 0.61}], "active": true, "note": null}

1. Read the question twice before you answer it.
2. Say what you know, what you assume, and what you would have to look up.
3. If there are several answers, begin with the one that is most likely.

Der Zug nach Hamburg fährt heute von Gleis sieben ab. Il pleut depuis ce matin, mais le ciel
s'éclaircit. El libro que me prestaste está encima de la mesa. La biblioteca chiude alle diciotto.

Suppose that a committee of seven people votes on a proposal, and that each of them is right with a
probability of 0.7, independently of the others. The majority is then right with a probability of
about 0.87. With nineteen people it is 0.97. This argument, which the Marquis de Condorcet published
in 1785, is often quoted in favour of large juries. Its weak point is the word "independently": people
read the same newspapers, went to the same schools and listen to each other, and a committee whose
members all make the same mistake is no wiser than one of them alone.

She closed the door behind her and listened. Somewhere below, a clock was striking, and she counted
without wanting to: nine, ten, eleven. The letter was still in her pocket. "You might as well read
it," her brother had said, "it will not get any shorter." She sat down on the stairs, in the light of
the small window, and broke the seal. It was not from her father at all.
'''
