"""The texts of mini LongBench: words, sentences with gaps, questions. All of them are ours."""

from __future__ import annotations

POOLS: dict[str, list[str]] = {
    pool: [word.strip() for word in words.split(",")]
    for pool, words in {
        "first": """
            Aldo, Berta, Cosmo, Della, Edvin, Fenna, Goran, Hedda, Ivo, Jorun, Kasper, Linnea, Marek, Nella,
            Osric, Petra, Quirin, Runa, Silas, Tova, Ulric, Vesna, Wendel, Xenia, Yorick, Zelda, Anselm,
            Birgit, Caspian, Dorte, Emeric, Frida, Gustaf, Hilma, Ingmar, Jutta, Konrad, Ludmila, Matthis,
            Noor
        """,
        "last": """
            Ashgrove, Brindle, Corrow, Dunmere, Elstow, Farrand, Gilmoor, Harrack, Ivelow, Jessamy, Kettlow,
            Lornay, Marchbank, Nettleby, Orrin, Pellow, Quarles, Ravenor, Stannick, Thorley, Umbers, Varlow,
            Wexby, Yarrick, Zennor, Ambry, Bellwether, Crake, Dapple, Emmerich, Fernley, Godwit, Hobbs,
            Inchbald, Jarvie, Kilner, Lovage, Mottley, Nightjar, Oldacre
        """,
        "town": """
            Arlowe, Bramstead, Caldrey, Dorrick, Ellsport, Fenwater, Gorsley, Hollinside, Ilmarsh, Jarrowby,
            Kelmouth, Larkhaven, Mossford, Norrington, Oakhythe, Pebbleton, Quarrydale, Ringmere, Saltby,
            Tarnwick, Underfell, Vintry, Wrenfield, Yewbridge, Aldermoor, Birchover, Cinderford, Dapplemere,
            Elmscar, Foxholt, Greywater, Hazelby, Ironcliff, Juniper, Kingsreed, Lowmoor, Millrace,
            Nettlecombe, Otterburn, Plumstead, Quenby, Rushwick, Sedgeley, Thornaby, Upperlea, Violetstown,
            Westmarsh, Yarncliffe
        """,
        "river": """
            Aster, Bellow, Carrow, Dunnet, Ember, Fallow, Garrick, Hush, Iskle, Kestle, Lidden, Marl, Nivel,
            Orrow, Pell, Quill, Rusk, Sorrel, Tamble, Ullet, Venn, Withy
        """,
        "trade": """
            baker, bookbinder, bell founder, brewer, mapmaker, candle maker, clockmaker, cooper, dyer,
            engraver, falconer, ferryman, gardener, glazier, goldsmith, harpist, joiner, lens grinder,
            locksmith, mason, miller, organ builder, paper maker, pharmacist, potter, printer, saddler,
            sail maker, shoemaker, stonecutter, weaver, wheelwright
        """,
        "collection": """
            glass bells, clay whistles, sea maps, tin soldiers, pressed ferns, door knockers, ship lanterns,
            wooden masks, silver thimbles, chess clocks, porcelain owls, tram tickets, bee boxes, brass keys,
            paper fans, ink bottles, snow globes, bird calls, pocket sundials, old spectacles, cork figures,
            harbour flags, tea tins, lace patterns, marble eggs, sailor knots, sugar moulds, umbrella handles,
            walking sticks, wax seals, weather glasses, zinc toys
        """,
        "object": """
            brass compass, walnut box, silver whistle, blue lantern, torn map, copper kettle, velvet glove,
            bone comb, leather satchel, rusty key, painted fan, stone cup, tin flute, red umbrella,
            wooden spoon, pearl button, iron bell, green bottle, striped scarf, pocket mirror, oak barrel,
            feather pen, chess board, amber ring, music box, fishing net, straw hat, wicker basket,
            glass prism, saddle bag
        """,
        "place": """
            old mill, lighthouse, bakery, chapel, boathouse, toll house, brewery, orchard, ice cellar,
            clock tower, ferry landing, quarry, schoolhouse, stable, observatory, fish market, greenhouse,
            foundry, signal hut, wash house, customs shed, granary, tannery, inn
        """,
        "street": """
            Lantern Street, Cooper Lane, Heron Row, Mill Steps, Saddler Court, Bell Alley, Quay Road,
            Tanner Street, Fern Walk, Chapel Hill, Rope Lane, Market Row, Well Street, Plum Lane, Gate Street,
            Swan Court, Anvil Road, Dove Steps, North Wharf, Copper Street, Ivy Lane, Kiln Road, Orchard Row,
            Silver Street, Thistle Lane, Vine Court, Willow Road, Barley Street, Crown Steps, Ember Lane
        """,
        "company": """
            Copperline Works, Bluefield Press, Harrow Brothers, Ninefold Foundry, Saltmarsh Mills,
            Tollgate Supply, Oxbow Instruments, Redwing Ceramics, Lanternhouse, Greywether Looms,
            Fivestone Brewery, Millwheel Bindery, Kestrel Optics, Dovetail Joinery, Quayside Ropes,
            Embergate Glass, Whitethorn Paper, Coldspring Organs
        """,
        "product": """
            Harrow organ, Tidewater clock, Moth loom, Pilgrim stove, Swallow kite, Juniper press,
            Ferryman lamp, Otter boat, Bramble telescope, Candlewick kettle, Heron bicycle, Sparrow accordion,
            Badger plough, Lark radio, Thimble sewing machine, Driftwood chair, Falcon barometer, Winter tent
        """,
        "film": """
            The Salt Ladder, Nine Quiet Bells, A Harbour of Paper, The Glass Orchard, Letters to Ilmarsh Pier,
            The Last Toll Keeper, Snow on the Slipway, Two Moons for Marta, The Clock That Waited,
            Beneath the Copper Roof, Winter of the Herons, The Unlit Lantern, Seven Barrels,
            The Weaver's Debt, Dust and Damsons, The Borrowed Coat, A Bridge of Reeds, The Cartwright's Secret
        """,
        "dish": """
            smoked trout pie, barley soup, plum dumplings, pickled walnuts, honey cake, nettle bread,
            cider stew, roasted quince, chestnut porridge, goat cheese tart, sorrel pancakes, apple fritters,
            lentil loaf, juniper sausage, elderflower jelly, beetroot pasties
        """,
        "weekday": """
            Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday
        """,
        "month": """
            January, February, March, April, May, June, July, August, September, October, November, December
        """,
    }.items()
}
SCENES = [
    (
        "Before dawn {a} slipped into the {place} and hid {thing} under a loose board, then swept the dust "
        "back over it.",
        "What did {a} hide in the {place}?",
        "{thing}",
    ),
    (
        "{a} sold {thing} to a pedlar at the {place}. The price was {n} silver coins, and {a} counted them twice.",
        "For how many silver coins did {a} sell {thing}?",
        "{n}",
    ),
    (
        "{a} dropped {thing} on the way to the {place} and never noticed. It was {b} who picked it up, and kept it.",
        "Who picked up {thing} that {a} had dropped?",
        "{b}",
    ),
    (
        "In the {place}, {a} made {b} a promise: to mend {thing} before the feast, whatever it might cost.",
        "What did {a} promise {b} to mend?",
        "{thing}",
    ),
    (
        "{a} and {b} met by chance at the {place}. {a} lent {b} {thing} there and then, and asked for no receipt.",
        "Where did {a} lend {b} {thing}?",
        "the {place}",
    ),
]
FILLERS = [
    "The wind had turned in the night and smelled of peat.",
    "Somewhere a dog barked twice and then thought better of it.",
    "Nobody in the street looked up; people had their own worries that year.",
    "A cart went by with turnips and a sleeping boy.",
    "The old women said that such weather made people honest, or ill.",
    "Rain ran down the gutters and made a small lake before the steps.",
    "It was said later that everything had begun with that hour, but it had not.",
    "The bells were late again, as they were every autumn.",
    "Smoke lay flat over the roofs and would not rise.",
    "For a while there was no sound but water.",
    "Three geese crossed the road as if they had bought it.",
    "By noon the frost was gone from the north side of the houses.",
    "The lamps were lit early, and the shutters closed one after another.",
    "On the hill the larches had lost the last of their needles.",
    "Children ran past with a kite that did not fly.",
    "There are days that leave no mark, and this might have been one of them.",
]
METHOD = [["Tarn", "Quill", "Osier", "Marrow", "Finch"], ["Net", "Tag", "Parse", "Align"]]
BASELINES = ["Plainwalk", "Gatekeeper", "Twostep", "Hedgerow", "Oldfield"]
LANGUAGES = ["Velnic", "Ostaran", "Mirrish", "Low Kellish", "Tammeric"]
SOURCES = ["harbour log books", "farm almanacs", "court records", "radio plays", "school essays"]
ARTICLE = (
    "{method}: Finding Clause Boundaries in {language}\n\nAbstract\nWe present {method}, a tagger that "
    "finds clause boundaries in {language}, a language for which no such tool existed. We describe the "
    "corpus, the model and its training, and compare with a rule-based system. The gain is largest for "
    "long sentences.\n\nIntroduction\nClause boundaries help with parsing, translation and reading "
    "aids. For well-studied languages they are a by-product of syntactic parsing. For small languages "
    "there are neither parsers nor treebanks, and a direct approach is cheaper. {language} is written "
    "without punctuation inside sentences, which makes the task hard for people as well. Earlier work "
    "used lists of conjunctions; such lists miss clauses that are joined by word order alone. We ask "
    "how far a small neural model can go with a modest amount of labelled data, and which mistakes are "
    "left.\n\nCorpus\nOur corpus has {sentences} sentences taken from {source}. All sentences were "
    "shown to {annotators} annotators, who marked the first word of each clause. Disagreements were "
    "settled in weekly meetings. {claim0} Each sentence comes with a translation. {claim2} One tenth "
    "of the sentences is kept for testing, one tenth for development. Sentences of fewer than five "
    "words were left out, since they hold one clause only.\n\nModel\n{method} reads a sentence word by "
    "word. The encoder has {layers} layers and a hidden size of 256. {claim1} A linear layer on top "
    "decides for every word whether a clause begins there. We use a dropout of {dropout} and a batch "
    "size of {batch}. {method} was trained for {epochs} epochs, and the state with the best score on "
    "the development part was kept.\n\nResults\nWe compare with {baseline}, a system of hand-written "
    "rules. {method} reaches an F1 score of {score} on the test set, {gain} points more than "
    "{baseline}. For sentences of more than thirty words the distance doubles. Errors cluster around "
    "quoted speech, where speakers break off and begin again. A look at the attention of the upper "
    "layers shows that the model follows verbs more than conjunctions, as people do.\n\nConclusion\nA "
    "small model and a modest corpus are enough to find clause boundaries in {language}. In the future "
    "we want to mark embedded clauses and to test the tagger on speech."
)
YES_NO = [
    (
        "Is the corpus released to the public?",
        "The corpus is released to the public.",
        "The corpus cannot be released to the public.",
    ),
    (
        "Do the authors use a pretrained encoder?",
        "The encoder was pretrained on unlabelled text.",
        "The encoder is trained from scratch, without pretraining.",
    ),
    (
        "Did native speakers check the translations?",
        "Native speakers checked all translations.",
        "Native speakers did not check the translations.",
    ),
]
FACTS = [
    ("How many sentences does the corpus have?", "{sentences}"),
    ("How many annotators labelled the corpus?", "{annotators} annotators"),
    ("Which baseline do the authors compare with?", "{baseline}"),
    ("How many layers does the encoder have?", "{layers} layers"),
    ("What F1 score does {method} reach on the test set?", "{score}"),
    ("For how many epochs was {method} trained?", "{epochs} epochs"),
    ("From where were the sentences of the corpus taken?", "{source}"),
]
NOWHERE = [
    "How many hours did the training take on one graphics card?",
    "What is the size of the vocabulary of {method}?",
    "Which university paid for the annotation?",
]
HOUSE = (
    "The {house} stands at {address}. It was opened in {year} by {founder}, who left it {n} exhibits. "
    "Visitors are welcome from {hour} in the morning on every day but {closed}, when the rooms are cleaned. "
    "A ticket costs {price} crowns; pupils pay half. The piece that most people come to see is {piece}, "
    "which was found in the attic of a farm. The kitchen on the ground floor serves {dish}. Lost things are "
    "kept for {weeks} weeks. Guided tours begin at the staircase and take a little less than an hour; bags "
    "must be left at the door."
)
HOUSE_QUESTIONS = [
    ("On which day of the week is the {house} closed?", "{closed}"),
    ("Who opened the {house}?", "{founder}"),
    ("What does the kitchen of the {house} serve?", "{dish}"),
    ("How many crowns does a ticket for the {house} cost?", "{price}"),
    ("In which year was the {house} opened?", "{year}"),
    ("Which piece do most people come to see in the {house}?", "{piece}"),
    ("How many weeks are lost things kept in the {house}?", "{weeks}"),
]
PERSON = (
    "{name} was born in {town} in {year}. After some years of travel {first} became {trade_a} and opened a "
    "workshop at {street} in {later}. Guests remember less the work than the collection upstairs: {first} "
    "owned {n} {collection} and knew the story of each."
)
FILM = (
    "{film} is a film of {out} that was directed by {name}. It was shot in {shot} in less than two months, "
    "with amateurs in most parts. Critics praised the light and disliked the ending; it ran for a year all "
    "the same."
)
PUPIL = (
    "{pupil} is a violinist. The teacher of {pupil} was {teacher}, who taught in a house with three pianos "
    "and believed in scales. Later {pupil} played in a small orchestra and spoke little of those years."
)
TOWN = (
    "{town} is a town of {people} people on the river {river}. The fair in {fair} draws visitors from the "
    "hills, who come for the {dish}. The town hall has two clocks, and they have never agreed."
)
COMPANY = (
    "{company} is a company that {name} founded in {since}. It is best known for the {product}, which has "
    "been built in the same way ever since. In good years {workers} people worked there. The company sends "
    "its apprentices abroad for a summer, a custom that the founder began."
)
HOTPOT_QUESTIONS = [
    ("In which town was the founder of {company} born?", "town"),
    ("What did the founder of {company} collect?", "collection"),
    ("What was the trade of the person who founded {company}?", "trade"),
    ("In which year was the founder of the company that built the {product} born?", "year"),
]
MUSIQUE_QUESTIONS = [
    ("On which river lies the town where the founder of the maker of the {product} was born?", "river"),
    ("What do visitors eat at the fair of the town where the founder of {company} was born?", "dish"),
    (
        "In which month is the fair of the town where the founder of the maker of the {product} was born?",
        "fair",
    ),
]
OFFICES = (
    "Harbour Safety,River Ferries,Public Baths,Street Lighting,Seed Supply,Bridge Inspection,School Meals,"
    "Mountain Rescue,Letter Delivery,Forest Roads"
).split(",")
OPENING = (
    "Review of the {office}, {year}\n\nWhy we did this review\nThe {office} serves every town of the "
    "province. The council asked us to examine how it works. We read its files, visited its branches, spoke "
    "with its staff and with people who depend on it, and compared what we were told with what was written. "
    "The work was done between spring and autumn; the office saw a draft and agreed with the facts in it."
)
FINDINGS = [
    (
        "Spending",
        "In {year} the office spent {a} million crowns, {p} percent more than in the year before.",
        "Most of the rise went into wages, which follow an agreement of the state with its servants. Travel "
        "cost less than planned. Two branches, in {t1} and {t2}, kept no books for the spring quarter and "
        "had to rebuild them from receipts.",
    ),
    (
        "Staff",
        "The office has {a} posts, of which {b} are vacant.",
        "Vacancies last longest where the work is done outdoors. In {t1} a post for an inspector was "
        "advertised five times. Managers told us that other employers answer within a week, while the "
        "office needs a season.",
    ),
    (
        "Delays",
        "Of the requests received in {year}, {p} percent were answered late.",
        "Requests are numbered by hand and travel between three floors. The branch in {t1} sorts them by "
        "weight, the one in {t2} by the first letter. Neither could tell us how many were lost. People who "
        "wrote twice were not served faster.",
    ),
    (
        "Records",
        "We found errors in {b} of {a} files that we sampled.",
        "The most frequent error was a missing date, the most costly one a wrong account. Files from {t1} "
        "were in good order. Staff in {t2} said that the form asks for the same number in four places, and "
        "that nobody knows which one counts.",
    ),
    (
        "Contracts",
        "{b} of {a} contracts were awarded without competing offers.",
        "The rules allow this in an emergency. The files name none. In {t1} the same supplier of rope was "
        "chosen eleven times, and its prices rose each time. In {t2} offers were asked for, but on the day "
        "after the choice.",
    ),
    (
        "Training",
        "Only {p} percent of the new staff finished the required course.",
        "The course takes a fortnight and is held once a year, in {t1}. Those who begin after it wait for "
        "the next. Supervisors in {t2} wrote their own leaflet, which is clear but leaves out the law.",
    ),
    (
        "Equipment",
        "{b} of the {a} boats and carts of the office are unfit for use.",
        "Repairs are ordered from a workshop in {t1} that closed some time ago; the letters came back. "
        "Crews borrow what they need. In {t2} a crew showed us a pump that it had built itself, and that "
        "works.",
    ),
    (
        "Complaints",
        "Complaints rose to {a} in {year}, and {b} of them are still open.",
        "Half of them concern opening hours. The branch in {t1} answers complaints by telephone and keeps "
        "no notes. In {t2} a box was set up in the hall; its key has been missing since the summer.",
    ),
]
ADVICE = [
    "publish its accounts every quarter",
    "fill vacant posts within sixty days",
    "number all requests in one register",
    "ask for three offers before every contract",
    "hold the course in every season",
    "inspect all equipment each spring",
    "answer complaints in writing",
]
TOPICS: list[tuple[str, list[tuple[str, str]]]] = [
    (
        "the colour of the casing",
        [
            ("dark green", "it hides scratches"),
            ("orange", "it is easy to find"),
            ("white", "it matches the older models"),
        ],
    ),
    (
        "the battery",
        [
            ("a replaceable cell", "people can change it themselves"),
            ("a rechargeable cell", "it costs less over five years"),
            ("a hand crank", "it works far from any shop"),
        ],
    ),
    (
        "the name of the product",
        [
            ("Larkline", "it sounds friendly"),
            ("Dormer", "it is short"),
            ("Pocket Beacon", "it says what the thing does"),
        ],
    ),
    (
        "the price",
        [
            ("29 crowns", "the cheapest rival costs thirty"),
            ("45 crowns", "it pays for the better speaker"),
            ("60 crowns", "the shops ask for a large margin"),
        ],
    ),
    (
        "the display",
        [
            ("two lines of text", "older users read it without glasses"),
            ("a row of lamps", "it needs hardly any power"),
            ("a paper dial", "it can be read in the sun"),
        ],
    ),
    (
        "the packaging",
        [
            ("a cloth bag", "it can be used again"),
            ("a cardboard tube", "it stacks well on a shelf"),
            ("a tin", "it survives the post"),
        ],
    ),
    (
        "the manual",
        [
            ("a single sheet of drawings", "it needs no translation"),
            ("a booklet", "the law asks for the full text"),
            ("a film", "nobody reads manuals"),
        ],
    ),
    (
        "the test group",
        [
            ("postmen", "they walk all day in every weather"),
            ("pupils", "they break things quickly"),
            ("pensioners", "they have time to write reports"),
        ],
    ),
    (
        "the guarantee",
        [
            ("two years", "the switch is rated for that"),
            ("five years", "no rival dares to offer it"),
            ("one year", "repairs would eat the profit"),
        ],
    ),
    (
        "the advertising",
        [
            ("posters in trams", "half of the town takes the tram"),
            ("a song on the radio", "people remember tunes"),
            ("stands at fairs", "everybody wants to try it first"),
        ],
    ),
]
TALK = [
    (
        "{lead}: Right , next point , {topic} .",
        "{one}: Um , I would say {x} , because {why_x} .",
        "{two}: I don't know . We talked about that last year and nobody was happy .",
        "{three}: What about {y} ? {why_y} , that's what the survey tells us .",
        "{one}: Okay , I can live with that .",
        "{lead}: So {y} it is . I'll put it in the minutes .",
    ),
    (
        "{lead}: Then there is {topic} . Who wants to start ?",
        "{two}: My team looked into it and we came up with {x} .",
        "{one}: And why ?",
        "{two}: Well , {why_x} .",
        "{three}: Yeah , but listen , {why_y} , if we take {y} . Doesn't that weigh more ?",
        "{lead}: I think it does . Everybody fine ? Good , {y} then .",
    ),
]
EVENTS = [
    (
        "A footbridge over the {river} was opened in {town} on {weekday}.",
        "It is {n} metres long and replaces a ferry that had run since {year}.",
        "Mayor {mayor} cut the ribbon in front of a large crowd.",
        "The last ferryman, {other}, was given {thing} as a present.",
        "The works took {m} months, longer than planned, because the bank had to be made firm.",
    ),
    (
        "Thieves took {n} {collection} from the museum of {town} in the night to {weekday}.",
        "They came through a window of the {place} next door and left no prints.",
        "The collection had been given to the town by {other} in {year}.",
        "The police found {thing} on the stairs and ask whom it belongs to.",
        "Mayor {mayor} promised {m} crowns to anyone who helps to find the pieces.",
    ),
    (
        "The {river} flooded the lower part of {town} on {weekday}.",
        "The water rose by {n} centimetres in one night, more than in {year}.",
        "{m} people slept in the {place}, which stands on higher ground.",
        "{other} brought soup in a boat and was cheered from the windows.",
        "Mayor {mayor} said that nobody was hurt and that the schools stay closed until further notice.",
    ),
    (
        "Workers who were digging near the {place} of {town} came upon a cellar full of {collection} on {weekday}.",
        "There are {n} pieces, wrapped in newspapers of {year}.",
        "The historian {other} believes that a merchant hid them from the tax collector.",
        "Beside them lay {thing}, which is now in the town hall.",
        "Mayor {mayor} wants to show the find for {m} days before it goes to a museum.",
    ),
]
NEWS_FILLERS = [
    "People were still talking about it at the market on the next day.",
    "A baker nearby said that he had heard nothing until noon.",
    "The weather was mild for the season, with a light wind from the west.",
    "Reporters had to leave their cars outside the old wall.",
    "The council will meet next week; its agenda is not yet known.",
    "A neighbour who did not want to be named spoke of a long day.",
    "Older people compared it with what their parents had told them.",
    "Shops in the main street stayed open longer than usual.",
    "The railway reported no delays.",
    "A school class had come by chance and took notes for an essay.",
    "The telephone of the town hall was busy all afternoon.",
    "An expert from the capital is expected in the coming days.",
    "The local choir cancelled its rehearsal.",
    "Not everybody is pleased: some had hoped for a quieter year.",
    "Readers sent in more photographs than this page can hold.",
    "A spokesman asked for patience and thanked the volunteers.",
    "There were rumours of all kinds, most of which proved to be wrong.",
    "The fire brigade was there as a precaution and went home early.",
    "By the evening the square was empty again.",
    "Insurance companies did not comment.",
    "A cat that had been missing for a week was seen again on a roof.",
    "The evening train brought visitors from the neighbouring villages.",
    "Nobody could say who had rung the bell.",
    "Two pensioners moved their game of chess to the other side of the square.",
]
# TREC's 50 fine classes under the names of LongBench, its misspelling of "something" included.
CLASSES = (
    "Abbreviation;Animal;City;Color;Country;Currency name;Date;Definition of something;Description of a "
    "person;Description of something;Disease and medicine;Distance, linear measure;Element and "
    "substance;Equivalent term;Event;Expression abbreviated;Food;Group or organization of "
    "person;Individual;Invention, book and other creative piece;Language;Lasting time of somethin;Letter "
    "like a-z;Manner of an action;Mountain;Musical instrument;Number of something;Order, rank;Organ of "
    "body;Other entity;Other location;Other number;Percent, fraction;Plant;Postcode or other "
    "code;Price;Product;Reason;Religion;Size, area and volume;Speed;Sport;State;Symbols and sign;Techniques "
    "and method;Temperature;Title of a person;Vehicle;Weight;Word with a special property"
).split(";")
QUESTIONS = {
    "Animal": ["What animal guards the gate of {town} ?", "What animal pulled the first tram of {town} ?"],
    "City": ["In what city was {name} born ?", "What city has its airport near {town} ?"],
    "Color": [
        "What color is the roof of the {place} in {town} ?",
        "What color did {name} wear at the fair ?",
    ],
    "Country": ["What country did {name} leave as a child ?", "What country buys most of the {collection} ?"],
    "Currency name": ["What currency is used in {town} ?", "What currency did {name} collect ?"],
    "Date": ["When did {name} open the {place} ?", "What year did the {river} flood {town} ?"],
    "Definition of something": ["What is {object} ?", "What are {collection} ?"],
    "Description of a person": ["Who was {name} ?", "Who is {name} , the {trade} ?"],
    "Distance, linear measure": ["How long is the river {river} ?", "How far is {town} from the sea ?"],
    "Food": ["What do people in {town} eat on Sundays ?", "What did {name} serve at the wedding ?"],
    "Group or organization of person": [
        "What company built the {place} of {town} ?",
        "What team did {name} play for ?",
    ],
    "Individual": ["Who founded {town} ?", "What {trade} won the prize of {town} ?"],
    "Language": ["What language did {name} learn last ?", "What language is spoken in {town} ?"],
    "Lasting time of somethin": [
        "How long did {name} live in {town} ?",
        "How long does the fair of {town} last ?",
    ],
    "Manner of an action": ["How do you repair {object} ?", "How did {name} get to {town} ?"],
    "Mountain": ["What is the highest mountain near {town} ?", "What peak did {name} climb ?"],
    "Musical instrument": [
        "What instrument did {name} play ?",
        "What instrument is kept in the {place} of {town} ?",
    ],
    "Number of something": ["How many {collection} did {name} own ?", "How many people live in {town} ?"],
    "Percent, fraction": [
        "What percentage of {town} is forest ?",
        "What fraction of the {collection} was sold ?",
    ],
    "Price": ["How much does {object} cost in {town} ?", "What did {name} pay for the {place} ?"],
    "Reason": ["Why did {name} leave {town} ?", "Why is the {place} of {town} closed ?"],
    "Speed": ["How fast does the {river} flow ?", "How fast could {name} run ?"],
    "Sport": ["What sport did {name} teach ?", "What game is played in {town} at Easter ?"],
    "Temperature": ["How cold does it get in {town} ?", "What temperature must the {place} have ?"],
    "Vehicle": ["What was the name of the ship that {name} sailed ?", "What boat sank in the {river} ?"],
    "Weight": ["How much does the bell of {town} weigh ?", "How heavy was {object} of {name} ?"],
}
TRIVIA = [
    ("Where was {name} born?", "{town}"),
    ("What did {name} collect?", "{collection}"),
    ("Which company did {name} found?", "{company}"),
    ("What was the trade of {name}?", "{trade}"),
    ("What is the company of {name} best known for?", "{product}"),
]
CHATS = [
    (
        [
            "{a}: hey, are you free on {weekday}?",
            "{b}: depends, why?",
            "{a}: I want to see the {place}, it's open again",
        ]
        + ["{b}: oh nice! what time?", "{a}: {n}?", "{b}: perfect, see you there :)"],
        "{a} and {b} will visit the {place} on {weekday} at {n}.",
    ),
    (
        [
            "{a}: I think I left {thing} at your place",
            "{b}: let me look",
            "{b}: found it, it was under the sofa!",
        ]
        + ["{a}: thank god", "{b}: shall I bring it to work?", "{a}: no, I'll come by on {weekday}"],
        "{a} left {thing} at {b}'s place. {a} will pick it up on {weekday}.",
    ),
    (
        [
            "{a}: what are we giving {c} for the birthday?",
            "{b}: no idea",
            "{b}: maybe {thing}?",
            "{a}: great idea",
        ]
        + ["{b}: it costs {m} crowns though", "{a}: we split it", "{b}: ok, I'll order it tonight"],
        "{a} and {b} will give {c} {thing} for {m} crowns. {b} will order it tonight.",
    ),
    (
        ["{a}: my train is late again", "{b}: where are you?", "{a}: stuck in {town}", "{b}: how long?"]
        + ["{a}: they say {m} minutes", "{b}: don't worry, I'll wait at the {place}", "{a}: you're the best"],
        "{a}'s train is stuck in {town} and will be {m} minutes late. {b} will wait at the {place}.",
    ),
    (
        [
            "{a}: did you hear about {c}?",
            "{b}: no, what happened?",
            "{a}: moving to {town}!",
            "{b}: no way, when?",
        ]
        + ["{a}: in {month}", "{b}: and the job?", "{a}: found one as {trade} there"],
        "{c} is moving to {town} in {month} and will work there as {trade}.",
    ),
    (
        ["{a}: I can't make it on {weekday}, sorry", "{b}: oh no, why?", "{a}: my boss needs me in {town}"]
        + ["{b}: ok, {month} then?", "{a}: yes, first weekend", "{b}: I'll cook {dish}", "{a}: can't wait"],
        "{a} cannot come on {weekday} because of work in {town}. They will meet in {month}, and {b} will cook {dish}.",
    ),
]
