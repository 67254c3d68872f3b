"""What made `models/tiny`: tokenizer, data, model, training run, export and the check of the export."""
