"""What a run tells: the record, trackers that copy it, the console, the report, and what each metric means."""
