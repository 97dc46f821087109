"""Pictures for documents: Gantt charts as SVG and PNG, and the curve of idle time against memory."""
