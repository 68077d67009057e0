"""What users of other FP8 GEMMs reported, a file per kind; the table is in test_user_reports.py."""
