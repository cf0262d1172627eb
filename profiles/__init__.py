"""Facts as data: cards, model shapes, TRL release behaviour; tiny loaders, standard library only."""
