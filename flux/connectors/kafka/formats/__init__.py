"""Keys and values of records: raw, text, JSON, CSV and Avro.

base             JSON and CSV to columns of a schema, and the base of all formats
avro_decode      Values in Avro, with the frame of a schema registry or without, to columns of a schema
avro_encode      The Avro field of each column, by the user's schema or by a schema that is derived from the columns
text_encode      The columns of rows to the keys and values of records
schema_registry  A request to a schema registry, bounded in time and bytes even if the registry sends slowly or without end
"""
