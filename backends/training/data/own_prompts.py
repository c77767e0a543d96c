"""Prompts to distil from, made from lists and patterns that were written for this project.

Public prompt collections are thin where people ask most: plain questions about the world, everyday advice, small pieces
of code. What is in :mod:`backends.bench.prompts` is left out here, topics included, so that benchmarks stay unseen.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

CONCEPTS = """
gravity; magnetism; electricity; nuclear energy; solar power; wind energy; a black hole; the solar system;
the moon's phases; a solar eclipse; an earthquake; a volcano; a tsunami; a hurricane; the ozone layer;
the greenhouse effect; the carbon cycle; soil erosion; biodiversity; an ecosystem; a food chain; natural selection;
a fossil; DNA; a gene; a cell; an enzyme; a hormone; the immune system; the nervous system; the human heart;
the digestive system; blood pressure; an allergy; diabetes; asthma; a balanced diet; protein; vitamin D; cholesterol;
dehydration; anxiety; meditation; yoga; first aid; a budget; compound interest; a mortgage; a credit score; insurance;
the stock market; a bond; a tax; a pension; supply and demand; a monopoly; globalization; a tariff; cryptocurrency;
a blockchain; the internet; a search engine; a web browser; a computer virus; a firewall; encryption; cloud computing;
a database; an operating system; open source software; machine learning; a neural network; a robot; GPS; a satellite;
a 3D printer; a microwave oven; a refrigerator; a battery; an electric car; a jet engine; a suspension bridge;
an elevator; a telescope; a microscope; a camera; a radio; a laser; a semiconductor; a bar code; democracy;
a constitution; the separation of powers; human rights; a court of law; a parliament; the United Nations; free speech;
a trade union; a refugee; philosophy; ethics; logic; psychology; sociology; archaeology; linguistics; a metaphor;
poetry; irony; jazz; an orchestra; opera; impressionism; sculpture; architecture; photography; film editing; ballet;
folklore; a prime number; a fraction; a percentage; probability; an average; algebra; geometry;
the Pythagorean theorem; statistics; a graph; the periodic table; an atom; a chemical reaction; an acid; rust;
fermentation; plastic; glass; steel; concrete; the placebo effect; memory; a habit; motivation; empathy; stress;
teamwork; leadership; negotiation; critical thinking; a glacier; a coral reef; a rainforest; a desert; a river delta;
the tides; an ocean current; fog; lightning; a rainbow; coffee; tea; chocolate; bread; cheese; honey; olive oil; rice;
salt; sugar; recycling; composting; organic farming; crop rotation; irrigation; a greenhouse; beekeeping; fishing;
forestry; a national park
"""

PAIRS = """
a crocodile and an alligator; a lake and a sea; a comet and an asteroid; speed and velocity; mass and weight;
heat and temperature; an atom and a molecule; a fruit and a vegetable; a moth and a butterfly; a frog and a toad;
a hare and a rabbit; jam and marmalade; baking soda and baking powder; butter and margarine;
a debit card and a credit card; a stock and a bond; gross and net income; renting and buying a home;
a manager and a leader; a job and a career; a goal and a dream; RAM and a hard disk; hardware and software;
HTTP and HTTPS; a compiler and an interpreter; a list and a tuple in Python; SQL and NoSQL; Java and JavaScript;
a phone and a tablet; an election and a referendum; a republic and a monarchy; a civil law and a criminal law;
an immigrant and a refugee; a fact and an opinion; empathy and sympathy; jealousy and envy; a simile and a metaphor;
a novel and a short story; a comedy and a tragedy; classical music and jazz; a violin and a viola;
a painter and a sculptor; an essay and a report; a cold and the flu; an antibiotic and a painkiller; fat and muscle;
aerobic and strength training; a psychologist and a psychiatrist; a symptom and a disease; a vein and an artery;
a hybrid and an electric car; petrol and diesel; a ship and a boat; a train and a tram; a hotel and a hostel;
a city and a town; a map and a globe
"""

ADVICE = """
learn a new language; learn to play the guitar; learn to swim; start running; train for a marathon; lose weight;
gain muscle; eat less sugar; drink more water; quit smoking; stop procrastinating; read more books; write a diary;
remember names; improve my memory; concentrate while I study; study for an exam; write an essay; give a speech;
overcome shyness; make new friends; keep in touch with old friends; apologize to a friend;
deal with a difficult colleague; ask for a raise; write a CV; write a cover letter; choose a career; change jobs;
start a small business; plan a budget; pay off a debt; invest for the first time; buy a used car; choose a laptop;
rent a flat; move to another city; sell old furniture; plan a wedding; organize a birthday party; plan a trip abroad;
pack a suitcase; travel with children; travel alone; overcome jet lag; go camping; hike in the mountains;
take better photos; ride a motorcycle safely; drive in snow; cook rice; bake bread; make a pizza at home; make soup;
cook for a large family; plan meals for a week; store vegetables; sharpen a knife; clean an oven; remove a stain;
grow tomatoes; plant a tree; start a vegetable garden; attract birds to my garden; get rid of ants; train a puppy;
adopt a cat; feed a goldfish; ride a horse; keep bees; save electricity; save water; reduce waste; insulate a house;
paint a room; hang a picture; fix a dripping tap; unblock a sink; assemble furniture; tidy a wardrobe;
protect my privacy online; choose a strong password; back up my data; speed up my computer; learn programming;
build a website; write a clear email; run a meeting; manage my time; delegate work; calm down when I am angry;
cope with stress; cope with a loss; support a sad friend; raise a teenager; help a child to read; choose a school;
learn mathematics; play chess; learn to draw
"""

PLACES = """
Paris; London; Berlin; Madrid; Lisbon; Vienna; Prague; Athens; Istanbul; Cairo; Marrakesh; Nairobi; Cape Town; Dubai;
Mumbai; Delhi; Bangkok; Singapore; Hanoi; Tokyo; Kyoto; Seoul; Beijing; Shanghai; Sydney; Auckland; New York; Chicago;
San Francisco; Mexico City; Havana; Lima; Buenos Aires; Rio de Janeiro; Toronto; Vancouver; Reykjavik; Dublin;
Edinburgh; Oslo; Stockholm; Copenhagen; Amsterdam; Brussels; Budapest; Warsaw; Norway; Greece; Japan; Peru
"""

EVENTS = """
the French Revolution; the American Civil War; the Second World War; the Cold War; the fall of the Roman Empire;
the Industrial Revolution; the Renaissance; the Black Death; the Great Depression; the Space Race;
the fall of the Berlin Wall; the discovery of penicillin; the invention of printing; the first moon landing;
the Crusades; the Silk Road; the Viking Age; the Mongol Empire; the Ottoman Empire; the British Empire;
the abolition of slavery; women's suffrage; the Russian Revolution; the Meiji Restoration;
the building of the pyramids; the Great Fire of London; the sinking of the Titanic; the Gold Rush;
the invention of the telephone; the Olympic Games
"""

QUESTIONS = """
Why is the sky blue?; Why is the sea salty?; Why do leaves change their color in autumn?; Why do cats purr?;
Why do we dream?; Why do we yawn?; Why do we age?; Why do onions make us cry?; Why do birds migrate?;
Why do bees make honey?; Why do stars twinkle?; Why does ice float on water?; Why does the moon have craters?;
Why do airplanes fly?; Why do ships float?; Why do metals conduct electricity?; Why do we have seasons?;
Why do we have time zones?; Why do languages change?; Why do people laugh?; How do plants drink water?;
How do fish breathe?; How do bats find their way in the dark?; How do spiders make webs?; How do birds fly?;
How does the heart pump blood?; How do our eyes see color?; How do we hear?; How do muscles grow?;
How does a wound heal?; How are mountains formed?; How are pearls made?; How is paper made?; How is glass made?;
How is chocolate made?; How is electricity produced?; How is steel produced?; How are movies made?;
How are laws made?; How are books printed?; Who was Albert Einstein?; Who was Marie Curie?;
Who was Leonardo da Vinci?; Who was Cleopatra?; Who was Nelson Mandela?; Who was Mahatma Gandhi?;
Who was William Shakespeare?; Who was Isaac Newton?; Who was Charles Darwin?; Who was Mozart?;
What do economists study?; What does a nurse do?; What does an engineer do?; What does a judge do?;
What does a software developer do?; What do whales eat?; What do we need iron for?; What causes a headache?;
What causes wind?; What makes a good teacher?
"""

CODE_TASKS = """
checks whether a string is a palindrome; counts the vowels in a string; finds the largest number in a list;
computes the factorial of a number; computes the n-th Fibonacci number;
computes the greatest common divisor of two numbers; converts Celsius to Fahrenheit;
converts a decimal number to binary; sums the digits of a number; removes duplicates from a list;
sorts a list with bubble sort; sorts a list with quicksort; finds the second largest element;
rotates a list by k places; finds the intersection of two lists; groups words by their first letter;
counts the lines of a file; reads a CSV file and prints its columns; writes a dictionary to a JSON file;
downloads a web page; parses a date string; computes the age from a birthday; generates a random password;
validates an email address; validates a phone number; implements a queue; implements a linked list;
implements a binary tree with insert and search; implements a hash map; traverses a tree in order;
finds the shortest path in a graph; solves the tower of Hanoi; generates all permutations of a list;
generates all subsets of a set; multiplies two matrices; transposes a matrix; computes the mean and the median;
simulates rolling two dice; plays rock, paper, scissors; plays a number guessing game; draws a pyramid of stars;
encodes text with a Caesar cipher; compresses a string by run lengths; checks whether brackets are balanced;
evaluates an arithmetic expression; formats a number with thousands separators; capitalizes every word;
finds the longest word in a sentence; computes the distance between two points; converts seconds to hours and minutes;
calculates compound interest; converts Roman numerals; prints a multiplication table; merges two dictionaries
"""

LANGUAGES = ("Python", "JavaScript", "Java", "C++", "Go", "Rust", "PHP")

CODE_REQUESTS = """
Write a SQL query that finds all employees hired in the last year.; Write a SQL query that counts orders per month.;
Write a SQL query that joins customers and orders.; Write a SQL statement that creates a table for books.;
Write a SQL query that finds duplicate rows.; Write an HTML page with a navigation bar and three sections.;
Write CSS that centers a card on the page.; Write an HTML table of five countries and their capitals.;
Write a CSS animation of a bouncing ball.; Write JavaScript that changes the color of a button when it is clicked.;
Write a bash script that renames all files in a folder to lower case.;
Write a bash script that checks whether a server is reachable.;
Write a bash loop that prints the numbers from 1 to 100.; Write a Dockerfile for a small Python web application.;
Write a Makefile for a C program with two source files.; Write a Flask application with two routes.;
Write a Python class for a library that lends books.; Write a Python class for a shopping cart.;
Write a Python class for a circle with area and perimeter.; Write a Java class for a student with a name and grades.;
Write a TypeScript interface for a user and a function that prints it.;
Write unit tests for a function that adds two numbers.; Write a Python context manager that opens and closes a file.;
Write a Python generator that yields even numbers.; Write a Python script that sends an email.;
Write a Python script that resizes all images in a folder.; Write a pandas script that groups sales by region.;
Write a program that prints the numbers from 1 to 100, with Fizz for multiples of three and Buzz for multiples of five.;
Write a REST API in Express with routes to list and add products.;
Write a Python script that draws a line chart with matplotlib.;
Write an example of a lambda function in Python and explain it.
"""

SUBJECTS = """
a lost dog; a dragon who is afraid of fire; a village without a name; a letter that arrives late;
a garden on the roof; a storm at sea; a summer evening; the night sky; an empty house; a river in spring;
a city at dawn; a forgotten song; a grandmother's kitchen; an autumn leaf; the color blue; a long journey;
a new beginning; a broken promise; a secret door; a detective and her cat; two brothers on a farm;
a teacher in a small town; a baker who hides a message in bread; a pilot who sees something strange;
an astronaut alone on Mars; a time traveler in ancient Egypt; a ghost who is lonely; a wizard's apprentice;
a thief with a conscience; friendship; courage; hope; loss; patience; silence; childhood; freedom; memory;
homesickness
"""

FORMS = (
    "Write a short story about {}.",
    "Write a poem about {}.",
    "Write the first paragraph of a novel about {}.",
    "Write a fairy tale about {}.",
    "Write a short dialogue about {}.",
    "Write a song about {}.",
    "Write a letter about {}.",
    "Describe a scene with {} in vivid language.",
)

_CHAT_PATTERNS = (
    (
        CONCEPTS,
        (
            "What is {}?",
            "Explain {} in simple words.",
            "How does {} work?",
            "Why does {} matter?",
            "Tell me some facts about {}.",
        ),
    ),
    (PAIRS, ("What is the difference between {}?", "Compare {}.")),
    (
        ADVICE,
        (
            "How can I {}?",
            "Give me a few tips on how to {}.",
            "I want to {}. Where should I start?",
            "What mistakes should I avoid when I {}?",
        ),
    ),
    (PLACES, ("What is {} famous for?", "Plan a weekend in {} for me.", "When is the best time to visit {}, and why?")),
    (EVENTS, ("What were the causes of {}?", "Tell me about {}.", "Why was {} important?")),
    (QUESTIONS, ("{}", "{} Explain it to a child.")),
)


def own_prompts() -> list[dict[str, Any]]:
    """Records with id, label and prompt, as ``heads answers`` and ``heads train`` read them; always in one order."""
    records = [
        {"id": f"own-{label}-{number}", "label": label, "prompt": prompt, "source": "own", "licence": "Apache-2.0"}
        for label, prompts in (("chat", _chat()), ("code", _code()), ("creative", _creative()))
        for number, prompt in enumerate(dict.fromkeys(prompts))
    ]
    random.Random(0).shuffle(records)
    return records


def _items(text: str) -> list[str]:
    return [item for part in text.split(";") if (item := " ".join(part.split()))]


def _chat() -> Iterator[str]:
    for items, patterns in _CHAT_PATTERNS:
        for item in _items(items):
            for pattern in patterns:
                yield pattern.format(item)


def _code() -> Iterator[str]:
    tasks = _items(CODE_TASKS)
    for number, task in enumerate(tasks):
        for offset in (0, 1, 3):
            language = "Python" if offset == 0 else LANGUAGES[(number + offset) % len(LANGUAGES)]
            what = "program" if task.startswith(("plays", "prints", "draws", "simulates")) else "function"
            yield f"Write a {language} {what} that {task}."
    yield from _items(CODE_REQUESTS)


def _creative() -> Iterator[str]:
    for subject in _items(SUBJECTS):
        for form in FORMS:
            yield form.format(subject)
