"""Parts of one program each, such as its tables, its child processes, and the pages and questions of report.py."""
