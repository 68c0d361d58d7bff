"""The document that the demo talks about, and the questions; invented, every name of it."""

from __future__ import annotations

HANDBOOK = """\
Operations handbook of the Harrow Point ferry station, ninth edition.

1. The station. Harrow Point is a ferry station on the island of Sund. It serves one route: from \
Harrow Point across the Grey Channel to the town of Marlow. The crossing is eleven kilometres \
long and takes forty minutes in calm water. The station was opened in 1962 and rebuilt after the \
fire of 1988. It has one pier, a waiting hall for eighty people, a workshop, a fuel store and a \
lamp tower. The station manager is Ingrid Vale. Her deputy is Tomas Reed. The workshop is led by \
Oona Brandt.

2. The ferries. Two ferries belong to the station. The larger one is called Petrel. She carries \
240 passengers and 36 cars, and needs a crew of nine. The smaller one is called Wren. She \
carries 60 passengers and no cars, and needs a crew of four. Petrel sails from the first of \
April to the end of October. Wren sails all year. When Petrel is in the dock, Wren makes two \
extra crossings a day, and cars have to wait. Both ferries burn marine diesel. Petrel uses 310 \
litres for a crossing, Wren uses 95 litres. No ferry may leave the pier with less than 1,200 \
litres in her tanks.

3. Timetable. The first ferry leaves Harrow Point at 06:20 and the last one at 21:40. From \
Marlow the first ferry leaves at 07:15 and the last one at 22:30. In summer there is a crossing \
every ninety minutes, in winter every three hours. On the night of the lantern feast, the second \
Saturday of August, there is one more crossing at midnight. Boarding ends five minutes before a \
ferry leaves. Nobody is let on board after the gate has been closed, not even the station \
manager.

4. Weather. The officer of the watch reads the wind at the lamp tower every hour, and every ten \
minutes once it is above 12 metres per second. Wren stays in the harbour when the wind is above \
17 metres per second. Petrel stays in the harbour when the wind is above 22 metres per second. \
In fog a ferry sails only if the lamp tower can be seen from the end of the pier. A yellow flag \
on the lamp tower means that crossings may be late. A red flag means that no ferry sails. The \
flag is changed by the officer of the watch alone, and each change is written into the blue log \
with the time, the wind and a name.

5. Pumps and power. The pier has two bilge pumps. The main pump stands in the workshop, the \
reserve pump stands under the waiting hall. If the main pump fails, first call Oona Brandt, then \
open the green valve, then start the reserve pump. Never start the reserve pump while the green \
valve is closed: the pipe will burst, as it did in 2004. Power comes from the mainland by a \
cable. If the cable fails, the generator behind the fuel store starts by itself within twenty \
seconds. It can feed the lamp tower, the radio and one pump for thirty hours. It cannot feed the \
heating of the waiting hall. The generator is tested on the first Monday of each month at ten \
o'clock.

6. Radio. The station listens on channel 14 at all times. The channel for talk between the \
ferries is 8. A call for help is answered by whoever hears it first, and the answer begins with \
the words "Harrow Point hears you". The radio is checked with Marlow each morning at six. If \
Marlow does not answer three times in a row, the officer of the watch telephones the Marlow \
harbour office.

7. Emergencies. If a person falls into the water, shout, throw the nearest ring, and press the \
orange button on the pier. The button stops the ferry's propellers, lights the pier and calls \
the rescue boat. The rescue boat is kept in the boat house north of the pier, with its tank \
full, and must be afloat within four minutes. In case of fire, everybody leaves through the \
north door and meets at the old anchor. The roll is called by the deputy. Nobody goes back for \
luggage. The fire brigade of Sund needs twelve minutes to reach the station, so the first hose \
is ours.

8. Passengers and goods. A ticket costs six crowns, a car costs twenty crowns, and children \
under seven travel free. Dogs travel free on a lead. Bicycles travel free on Petrel and cost two \
crowns on Wren. Gas bottles are carried on deck only, never more than four at once. Bees are \
carried on the last ferry only, in closed hives, behind the funnel. Lost things are kept in the \
station for sixty days; after that they are given to the school of Sund.

9. The watch. A watch lasts eight hours. It begins with reading the blue log and ends with \
signing it. The officer of the watch carries the brass key, which opens the lamp tower, the fuel \
store and the boat house. There is one brass key and no copy. Whoever loses it buys breakfast \
for the crew, and tells the station manager before the breakfast, not after.
"""

# The fourth answer is long, so that there is a middle in which the daemon can be killed.
QUESTIONS = (
    "Who is the station manager?",
    "Tell me about the two ferries.",
    "When was the station opened, and when was it rebuilt?",
    "Write a short letter in which you welcome a new officer of the watch to Harrow Point.",
    "Who carries the brass key, and which doors does it open?",
)
