CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT);
CREATE TABLE orders (customer INTEGER, amount INTEGER);
INSERT INTO customers VALUES (1, 'Ada'), (2, 'Grace'), (3, 'Edsger');
INSERT INTO orders VALUES (1, 30), (2, 25), (1, 12), (2, 40);
