-- A queue as schema 1 wrote it, never to be changed: every later version has to open it.
PRAGMA application_id = 1165388900;
PRAGMA user_version = 1;
BEGIN TRANSACTION;
CREATE TABLE attempts (
            fence INTEGER PRIMARY KEY, job TEXT NOT NULL, attempt INTEGER NOT NULL, devices TEXT NOT NULL,
            began_s REAL NOT NULL, ended_s REAL, ending TEXT NOT NULL, reason TEXT NOT NULL, runner TEXT,
            UNIQUE (job, attempt));
INSERT INTO "attempts" VALUES(3,'j1',1,'["h0.4"]',7.1,907.2,'Ended','code 0',NULL);
INSERT INTO "attempts" VALUES(19,'j12',1,'["h0.2", "h1.5"]',1.87039999999999986355e+03,1.87739999999999986361e+03,'Lost','its runner is gone',NULL);
INSERT INTO "attempts" VALUES(24,'j21',1,'["h1.5", "h0.2"]',2.78439999999999963616e+03,NULL,'','',NULL);
INSERT INTO "attempts" VALUES(43,'j12',2,'["h0.0"]',9162.5,NULL,'','',NULL);
INSERT INTO "attempts" VALUES(62,'j56',1,'["h0.4"]',1.82121000000000021834e+04,NULL,'','',NULL);
CREATE TABLE devices (position INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, body TEXT NOT NULL, closed TEXT);
INSERT INTO "devices" VALUES(1,'h0.2','{"id":"h0.2","host":"h0","memory_bytes":2,"speed":1.5}','a stranger: python, pid 3');
INSERT INTO "devices" VALUES(2,'h1.5','{"id":"h1.5","host":"h1","memory_bytes":5,"speed":1.5}',NULL);
INSERT INTO "devices" VALUES(3,'h0.0','{"id":"h0.0","host":"h0","speed":1.5}',NULL);
INSERT INTO "devices" VALUES(4,'h0.4','{"id":"h0.4","host":"h0","memory_bytes":4,"speed":1.5}','a stranger: python, pid 3');
CREATE TABLE events (
            number INTEGER PRIMARY KEY, time_s REAL NOT NULL, kind TEXT NOT NULL, job TEXT, body TEXT NOT NULL,
            extra TEXT);
INSERT INTO "events" VALUES(1,0.1,'DeviceAdded',NULL,'{"time_s":0.1,"device":{"id":"h0.4","host":"h0","memory_bytes":4,"speed":1.5}}',NULL);
INSERT INTO "events" VALUES(2,0.1,'Submitted','j1','{"time_s":0.1,"job":"j1","spec":{"user":"ann","needs":{"max_devices":2},"priority":-1,"total":1000.0,"retries":1}}','{"command":["train","j1"],"é":1}');
INSERT INTO "events" VALUES(3,7.1,'Placed','j1','{"time_s":7.1,"job":"j1","devices":["h0.4"],"attempt":1,"reason":"it fits"}',NULL);
INSERT INTO "events" VALUES(4,7.19999999999999928945e+00,'SettingsSet',NULL,'{"time_s":7.199999999999999,"settings":{"policy":"srpt","starve_after_s":Infinity,"max_lost":2}}',NULL);
INSERT INTO "events" VALUES(5,907.2,'Submitted','j4','{"time_s":907.2,"job":"j4","spec":{"user":"bob","needs":{"max_devices":2},"name":"größe\n''; DROP TABLE jobs;--","priority":1,"total":1000.0,"retries":1}}','{"command":["train","j4"],"é":1}');
INSERT INTO "events" VALUES(6,907.2,'Ended','j1','{"time_s":907.2,"job":"j1","is_success":false,"reason":"code 0"}',NULL);
INSERT INTO "events" VALUES(7,914.2,'Held','j4','{"time_s":914.2,"job":"j4"}',NULL);
INSERT INTO "events" VALUES(8,914.2,'DeviceRemoved',NULL,'{"time_s":914.2,"device":"h0.4"}',NULL);
INSERT INTO "events" VALUES(9,921.2,'DeviceAdded',NULL,'{"time_s":921.2,"device":{"id":"h0.2","host":"h0","memory_bytes":2,"speed":1.5}}',NULL);
INSERT INTO "events" VALUES(10,1828.2,'Ended','j1','{"time_s":1828.2,"job":"j1","is_success":false,"reason":"code 0"}',NULL);
INSERT INTO "events" VALUES(11,1835.2,'Submitted','j10','{"time_s":1835.2,"job":"j10","spec":{"user":"bob","name":"größe\n''; DROP TABLE jobs;--","priority":-1,"total":1000.0,"retries":1}}','{"command":["train","j10"],"é":1}');
INSERT INTO "events" VALUES(12,1842.2,'Held','j4','{"time_s":1842.2,"job":"j4"}',NULL);
INSERT INTO "events" VALUES(13,1849.2,'Submitted','j12','{"time_s":1849.2,"job":"j12","spec":{"user":"ann","needs":{"max_devices":2},"priority":-1,"total":1000.0}}','{"command":["train","j12"],"é":1}');
INSERT INTO "events" VALUES(14,1856.2,'Reported','j4','{"time_s":1856.2,"job":"j4","done":45.840099258522926,"total":100.0,"rate_per_s":0.30000000000000004,"rates":[1.0,1.9]}',NULL);
INSERT INTO "events" VALUES(15,1856.3,'LimitsSet',NULL,'{"time_s":1856.3,"user":"user5","limits":{"max_queued":5,"share":6}}',NULL);
INSERT INTO "events" VALUES(16,1863.3,'Reported','j10','{"time_s":1863.3,"job":"j10","done":12.991832762845512,"total":100.0,"rate_per_s":0.30000000000000004,"rates":[1.0,1.9]}',NULL);
INSERT INTO "events" VALUES(17,1870.3,'DeviceAdded',NULL,'{"time_s":1870.3,"device":{"id":"h1.5","host":"h1","memory_bytes":5,"speed":1.5}}',NULL);
INSERT INTO "events" VALUES(18,1.87039999999999986355e+03,'SettingsSet',NULL,'{"time_s":1870.3999999999999,"settings":{"policy":"srpt","starve_after_s":Infinity,"max_lost":2}}',NULL);
INSERT INTO "events" VALUES(19,1.87039999999999986355e+03,'Placed','j12','{"time_s":1870.3999999999999,"job":"j12","devices":["h0.2","h1.5"],"attempt":1,"reason":"it fits"}',NULL);
INSERT INTO "events" VALUES(20,1.87739999999999986361e+03,'Lost','j12','{"time_s":1877.3999999999999,"job":"j12","reason":"its runner is gone"}',NULL);
INSERT INTO "events" VALUES(21,2.78439999999999963616e+03,'Reported','j10','{"time_s":2784.3999999999996,"job":"j10","done":40.471985115912275,"rate_per_s":0.30000000000000004,"rates":[1.0,1.9]}',NULL);
INSERT INTO "events" VALUES(22,2.78439999999999963616e+03,'Submitted','j21','{"time_s":2784.3999999999996,"job":"j21","spec":{"user":"bob","needs":{"max_devices":2},"name":"größe\n''; DROP TABLE jobs;--","total":1000.0,"retries":1}}','{"command":["train","j21"],"é":1}');
INSERT INTO "events" VALUES(23,2.78439999999999963616e+03,'Held','j10','{"time_s":2784.3999999999996,"job":"j10"}',NULL);
INSERT INTO "events" VALUES(24,2.78439999999999963616e+03,'Placed','j21','{"time_s":2784.3999999999996,"job":"j21","devices":["h1.5","h0.2"],"attempt":1,"reason":"it fits"}',NULL);
INSERT INTO "events" VALUES(25,2.7913999999999996363e+03,'ReservationSet',NULL,'{"time_s":2791.3999999999996,"reservation":{"id":"r5","devices":["h1.5"],"start_s":2791.3999999999996,"end_s":2851.3999999999996,"users":["ann"]}}',NULL);
INSERT INTO "events" VALUES(26,2.79839999999999963623e+03,'LimitsSet',NULL,'{"time_s":2798.3999999999996,"user":"user3","limits":{"max_queued":3,"share":4}}',NULL);
INSERT INTO "events" VALUES(27,2.79869999999999936337e+03,'Reported','j12','{"time_s":2798.6999999999994,"job":"j12","done":66.46993483183317,"rate_per_s":0.30000000000000004,"rates":[1.0,1.9]}',NULL);
INSERT INTO "events" VALUES(28,2.79879999999999927234e+03,'LimitsSet',NULL,'{"time_s":2798.7999999999993,"user":"user4","limits":{"max_queued":4,"share":5}}',NULL);
INSERT INTO "events" VALUES(29,2.80589999999999918142e+03,'Reported','j10','{"time_s":2805.899999999999,"job":"j10","done":51.993131858294326,"total":100.0,"rate_per_s":0.30000000000000004,"rates":[1.0,1.9]}',NULL);
INSERT INTO "events" VALUES(30,2.81289999999999918139e+03,'SettingsSet',NULL,'{"time_s":2812.899999999999,"settings":{"policy":"srpt","starve_after_s":Infinity,"max_lost":2}}',NULL);
INSERT INTO "events" VALUES(31,2.81999999999999909055e+03,'Submitted','j30','{"time_s":2819.999999999999,"job":"j30","spec":{"user":"bob","priority":1,"total":1000.0,"after":[{"job":"j21","condition":"any"}]}}','{"command":["train","j30"],"é":1}');
INSERT INTO "events" VALUES(32,2.82009999999999899948e+03,'Submitted','j31','{"time_s":2820.099999999999,"job":"j31","spec":{"user":"ann","needs":{"max_devices":2},"name":"größe\n''; DROP TABLE jobs;--","total":1000.0}}','{"command":["train","j31"],"é":1}');
INSERT INTO "events" VALUES(33,3.72019999999999890854e+03,'LimitsSet',NULL,'{"time_s":3720.199999999999,"user":"user1","limits":{"max_queued":1,"share":2}}',NULL);
INSERT INTO "events" VALUES(34,3.72719999999999890868e+03,'ReservationSet',NULL,'{"time_s":3727.199999999999,"reservation":{"id":"r1","devices":["h1.5"],"start_s":3727.199999999999,"end_s":3787.199999999999,"users":["ann"]}}',NULL);
INSERT INTO "events" VALUES(35,3.72729999999999881766e+03,'Submitted','j34','{"time_s":3727.299999999999,"job":"j34","spec":{"user":"ann","needs":{"max_devices":2},"priority":1,"retries":1}}','{"command":["train","j34"],"é":1}');
INSERT INTO "events" VALUES(36,5.53429999999999927247e+03,'Submitted','j35','{"time_s":5534.299999999999,"job":"j35","spec":{"user":"bob","name":"größe\n''; DROP TABLE jobs;--","after":[{"job":"j31"}]}}','{"command":["train","j35"],"é":1}');
INSERT INTO "events" VALUES(37,6.43429999999999927256e+03,'DeviceClosed',NULL,'{"time_s":6434.299999999999,"device":"h0.2","reason":"a stranger: python, pid 3"}',NULL);
INSERT INTO "events" VALUES(38,9148.3,'Submitted','j37','{"time_s":9148.3,"job":"j37","spec":{"user":"ann","needs":{"max_devices":2},"priority":1,"retries":1}}','{"command":["train","j37"],"é":1}');
INSERT INTO "events" VALUES(39,9148.3,'LimitsSet',NULL,'{"time_s":9148.3,"user":"user0","limits":{}}',NULL);
INSERT INTO "events" VALUES(40,9155.3,'DeviceClosed',NULL,'{"time_s":9155.3,"device":"h0.2","reason":"a stranger: python, pid 3"}',NULL);
INSERT INTO "events" VALUES(41,9155.4,'DeviceAdded',NULL,'{"time_s":9155.4,"device":{"id":"h0.0","host":"h0","speed":1.5}}',NULL);
INSERT INTO "events" VALUES(42,9162.5,'DeviceAdded',NULL,'{"time_s":9162.5,"device":{"id":"h0.2","host":"h0","memory_bytes":2,"speed":1.5}}',NULL);
INSERT INTO "events" VALUES(43,9162.5,'Placed','j12','{"time_s":9162.5,"job":"j12","devices":["h0.0"],"attempt":2,"reason":"it fits"}',NULL);
INSERT INTO "events" VALUES(44,9169.5,'Released','j10','{"time_s":9169.5,"job":"j10"}',NULL);
INSERT INTO "events" VALUES(45,9169.6,'DeviceClosed',NULL,'{"time_s":9169.6,"device":"h0.2","reason":"a stranger: python, pid 3"}',NULL);
INSERT INTO "events" VALUES(46,9169.6,'Respecified','j4','{"time_s":9169.6,"job":"j4","spec":{"user":"bob","name":"größe\n''; DROP TABLE jobs;--","priority":-1,"total":1000.0,"retries":1}}',NULL);
INSERT INTO "events" VALUES(47,9169.7,'DeviceAdded',NULL,'{"time_s":9169.7,"device":{"id":"h0.2","host":"h0","memory_bytes":2,"speed":1.5}}',NULL);
INSERT INTO "events" VALUES(48,9176.7,'LimitsSet',NULL,'{"time_s":9176.7,"user":"user3","limits":{"max_queued":3,"share":4}}',NULL);
INSERT INTO "events" VALUES(49,10076.7,'DeviceAdded',NULL,'{"time_s":10076.7,"device":{"id":"h0.2","host":"h0","memory_bytes":2,"speed":1.5}}',NULL);
INSERT INTO "events" VALUES(50,11876.7,'DeviceAdded',NULL,'{"time_s":11876.7,"device":{"id":"h1.5","host":"h1","memory_bytes":5,"speed":1.5}}',NULL);
INSERT INTO "events" VALUES(51,1.27838000000000010913e+04,'Submitted','j50','{"time_s":12783.800000000001,"job":"j50","spec":{"user":"ann","retries":1}}','{"command":["train","j50"],"é":1}');
INSERT INTO "events" VALUES(52,1.3683900000000001455e+04,'StopAsked','j12','{"time_s":13683.900000000001,"job":"j12","then":"CANCELLED","reason":"for bob''s"}',NULL);
INSERT INTO "events" VALUES(53,1.36840000000000018185e+04,'Submitted','j52','{"time_s":13684.000000000002,"job":"j52","spec":{"user":"bob","needs":{"max_devices":2},"total":1000.0,"retries":1}}','{"command":["train","j52"],"é":1}');
INSERT INTO "events" VALUES(54,1.36910000000000018184e+04,'Submitted','j53','{"time_s":13691.000000000002,"job":"j53","spec":{"user":"ann","name":"größe\n''; DROP TABLE jobs;--"}}','{"command":["train","j53"],"é":1}');
INSERT INTO "events" VALUES(55,1.4591000000000001819e+04,'DeviceAdded',NULL,'{"time_s":14591.000000000002,"device":{"id":"h0.2","host":"h0","memory_bytes":2,"speed":1.5}}',NULL);
INSERT INTO "events" VALUES(56,1.54910000000000018191e+04,'Released','j30','{"time_s":15491.000000000002,"job":"j30"}',NULL);
INSERT INTO "events" VALUES(57,1.54980000000000018188e+04,'Submitted','j56','{"time_s":15498.000000000002,"job":"j56","spec":{"user":"bob"}}','{"command":["train","j56"],"é":1}');
INSERT INTO "events" VALUES(58,1.54981000000000021825e+04,'Cancelled','j52','{"time_s":15498.100000000002,"job":"j52"}',NULL);
INSERT INTO "events" VALUES(59,1.6398100000000002183e+04,'Submitted','j58','{"time_s":16398.100000000002,"job":"j58","spec":{"user":"ann","name":"größe\n''; DROP TABLE jobs;--","priority":1,"retries":1}}','{"command":["train","j58"],"é":1}');
INSERT INTO "events" VALUES(60,1.81981000000000021823e+04,'DeviceAdded',NULL,'{"time_s":18198.100000000002,"device":{"id":"h0.4","host":"h0","memory_bytes":4,"speed":1.5}}',NULL);
INSERT INTO "events" VALUES(61,1.82051000000000021824e+04,'Submitted','j60','{"time_s":18205.100000000002,"job":"j60","spec":{"user":"ann","priority":1,"after":[{"job":"j10","condition":"any"}],"retries":1}}','{"command":["train","j60"],"é":1}');
INSERT INTO "events" VALUES(62,1.82121000000000021834e+04,'Placed','j56','{"time_s":18212.100000000002,"job":"j56","devices":["h0.4"],"attempt":1,"reason":"it fits"}',NULL);
INSERT INTO "events" VALUES(63,18212.2,'Reported','j37','{"time_s":18212.2,"job":"j37","done":14.003964085897202,"total":100.0,"rate_per_s":0.30000000000000004,"rates":[1.0,1.9]}',NULL);
INSERT INTO "events" VALUES(64,20912.3,'Held','j37','{"time_s":20912.3,"job":"j37"}',NULL);
INSERT INTO "events" VALUES(65,22712.3,'Submitted','j64','{"time_s":22712.3,"job":"j64","spec":{"user":"bob","needs":{"max_devices":2},"priority":-1,"retries":1}}','{"command":["train","j64"],"é":1}');
INSERT INTO "events" VALUES(66,2.27123999999999978162e+04,'DeviceClosed',NULL,'{"time_s":22712.399999999998,"device":"h0.4","reason":"a stranger: python, pid 3"}',NULL);
INSERT INTO "events" VALUES(67,2.36124999999999963628e+04,'Submitted','j66','{"time_s":23612.499999999996,"job":"j66","spec":{"user":"ann","name":"größe\n''; DROP TABLE jobs;--","total":1000.0}}','{"command":["train","j66"],"é":1}');
INSERT INTO "events" VALUES(68,2.45194999999999963609e+04,'Submitted','j67','{"time_s":24519.499999999996,"job":"j67","spec":{"user":"bob","priority":1,"retries":1}}','{"command":["train","j67"],"é":1}');
INSERT INTO "events" VALUES(69,2.45195999999999949062e+04,'Submitted','j68','{"time_s":24519.599999999995,"job":"j68","spec":{"user":"ann","needs":{"max_devices":2},"priority":1,"total":1000.0,"after":[{"job":"j4"}],"retries":1}}','{"command":["train","j68"],"é":1}');
INSERT INTO "events" VALUES(70,2.45195999999999949062e+04,'Respecified','j66','{"time_s":24519.599999999995,"job":"j66","spec":{"user":"ann","total":1000.0}}',NULL);
CREATE TABLE facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
INSERT INTO "facts" VALUES('epoch',1);
INSERT INTO "facts" VALUES('settings','{"policy":"srpt","starve_after_s":Infinity,"max_lost":2}');
INSERT INTO "facts" VALUES('time_s',2.45195999999999949062e+04);
CREATE TABLE jobs (
            number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, user TEXT NOT NULL, name TEXT NOT NULL,
            state TEXT NOT NULL, priority INTEGER NOT NULL, min_devices INTEGER NOT NULL, max_devices INTEGER NOT NULL,
            devices TEXT NOT NULL, submitted_s REAL NOT NULL, since_s REAL NOT NULL, attempt INTEGER NOT NULL,
            done REAL NOT NULL, total REAL, rate_per_s REAL NOT NULL, reported_s REAL NOT NULL, reason TEXT NOT NULL,
            body TEXT NOT NULL);
INSERT INTO "jobs" VALUES(1,'j1','ann','','FAILED',-1,1,2,'[]',0.1,1828.2,1,0.0,1000.0,0.0,0.0,'code 0','{"id":"j1","spec":{"user":"ann","needs":{"max_devices":2},"priority":-1,"total":1000.0,"retries":1},"submitted_s":0.1,"state":"FAILED","since_s":1828.2,"attempt":1,"attempt_began_s":7.1,"held_s":900.1,"service_device_s":900.1,"waited_s":928.0,"accounted_s":1828.2,"num_failures":1,"total":1000.0,"reason":"code 0"}');
INSERT INTO "jobs" VALUES(2,'j4','bob','größe
''; DROP TABLE jobs;--','PENDING',-1,1,1,'[]',907.2,907.2,0,4.58400992585229261067e+01,1000.0,3.00000000000000044408e-01,1856.2,'','{"id":"j4","spec":{"user":"bob","name":"größe\n''; DROP TABLE jobs;--","priority":-1,"total":1000.0,"retries":1},"submitted_s":907.2,"since_s":907.2,"waited_s":7.0,"accounted_s":9169.6,"done":45.840099258522926,"total":1000.0,"rate_per_s":0.30000000000000004,"reported_s":1856.2,"rates":[1.0,1.9],"is_held":true}');
INSERT INTO "jobs" VALUES(3,'j10','bob','größe
''; DROP TABLE jobs;--','PENDING',-1,1,1,'[]',1835.2,1835.2,0,5.19931318582943262623e+01,100.0,3.00000000000000044408e-01,2.80589999999999918142e+03,'','{"id":"j10","spec":{"user":"bob","name":"größe\n''; DROP TABLE jobs;--","priority":-1,"total":1000.0,"retries":1},"submitted_s":1835.2,"since_s":1835.2,"waited_s":949.1999999999996,"accounted_s":9169.5,"done":51.993131858294326,"total":100.0,"rate_per_s":0.30000000000000004,"reported_s":2805.899999999999,"rates":[1.0,1.9]}');
INSERT INTO "jobs" VALUES(4,'j12','ann','','PREEMPTING',-1,1,2,'["h0.0"]',1849.2,1.3683900000000001455e+04,2,6.64699348318331715299e+01,1000.0,0.0,2.79869999999999936337e+03,'for bob''s','{"id":"j12","spec":{"user":"ann","needs":{"max_devices":2},"priority":-1,"total":1000.0},"submitted_s":1849.2,"state":"PREEMPTING","since_s":13683.900000000001,"attempt":2,"devices":["h0.0"],"attempt_began_s":9162.5,"held_s":4528.4000000000015,"service_device_s":4535.4000000000015,"waited_s":7306.3,"accounted_s":13683.900000000001,"num_restarts":1,"num_lost":1,"done":66.46993483183317,"total":1000.0,"reported_s":2798.6999999999994,"rates":[1.0,1.9],"ending":"CANCELLED","reason":"for bob''s"}');
INSERT INTO "jobs" VALUES(5,'j21','bob','größe
''; DROP TABLE jobs;--','STARTING',0,1,2,'["h1.5", "h0.2"]',2.78439999999999963616e+03,2.78439999999999963616e+03,1,0.0,1000.0,0.0,0.0,'it fits','{"id":"j21","spec":{"user":"bob","needs":{"max_devices":2},"name":"größe\n''; DROP TABLE jobs;--","total":1000.0,"retries":1},"submitted_s":2784.3999999999996,"state":"STARTING","since_s":2784.3999999999996,"attempt":1,"devices":["h1.5","h0.2"],"attempt_began_s":2784.3999999999996,"accounted_s":2784.3999999999996,"total":1000.0,"reason":"it fits"}');
INSERT INTO "jobs" VALUES(6,'j30','bob','','PENDING',1,1,1,'[]',2.81999999999999909055e+03,2.81999999999999909055e+03,0,0.0,1000.0,0.0,0.0,'','{"id":"j30","spec":{"user":"bob","priority":1,"total":1000.0,"after":[{"job":"j21","condition":"any"}]},"submitted_s":2819.999999999999,"since_s":2819.999999999999,"accounted_s":15491.000000000002,"total":1000.0,"unmet":["j21"]}');
INSERT INTO "jobs" VALUES(7,'j31','ann','größe
''; DROP TABLE jobs;--','PENDING',0,1,2,'[]',2.82009999999999899948e+03,2.82009999999999899948e+03,0,0.0,1000.0,0.0,0.0,'','{"id":"j31","spec":{"user":"ann","needs":{"max_devices":2},"name":"größe\n''; DROP TABLE jobs;--","total":1000.0},"submitted_s":2820.099999999999,"since_s":2820.099999999999,"accounted_s":2820.099999999999,"total":1000.0}');
INSERT INTO "jobs" VALUES(8,'j34','ann','','PENDING',1,1,2,'[]',3.72729999999999881766e+03,3.72729999999999881766e+03,0,0.0,NULL,0.0,0.0,'','{"id":"j34","spec":{"user":"ann","needs":{"max_devices":2},"priority":1,"retries":1},"submitted_s":3727.299999999999,"since_s":3727.299999999999,"accounted_s":3727.299999999999}');
INSERT INTO "jobs" VALUES(9,'j35','bob','größe
''; DROP TABLE jobs;--','PENDING',0,1,1,'[]',5.53429999999999927247e+03,5.53429999999999927247e+03,0,0.0,NULL,0.0,0.0,'','{"id":"j35","spec":{"user":"bob","name":"größe\n''; DROP TABLE jobs;--","after":[{"job":"j31"}]},"submitted_s":5534.299999999999,"since_s":5534.299999999999,"accounted_s":5534.299999999999,"unmet":["j31"]}');
INSERT INTO "jobs" VALUES(10,'j37','ann','','PENDING',1,1,2,'[]',9148.3,9148.3,0,1.4003964085897202096e+01,100.0,3.00000000000000044408e-01,18212.2,'','{"id":"j37","spec":{"user":"ann","needs":{"max_devices":2},"priority":1,"retries":1},"submitted_s":9148.3,"since_s":9148.3,"waited_s":11764.0,"accounted_s":20912.3,"done":14.003964085897202,"total":100.0,"rate_per_s":0.30000000000000004,"reported_s":18212.2,"rates":[1.0,1.9],"is_held":true}');
INSERT INTO "jobs" VALUES(11,'j50','ann','','PENDING',0,1,1,'[]',1.27838000000000010913e+04,1.27838000000000010913e+04,0,0.0,NULL,0.0,0.0,'','{"id":"j50","spec":{"user":"ann","retries":1},"submitted_s":12783.800000000001,"since_s":12783.800000000001,"accounted_s":12783.800000000001}');
INSERT INTO "jobs" VALUES(12,'j52','bob','','CANCELLED',0,1,2,'[]',1.36840000000000018185e+04,1.54981000000000021825e+04,0,0.0,1000.0,0.0,0.0,'','{"id":"j52","spec":{"user":"bob","needs":{"max_devices":2},"total":1000.0,"retries":1},"submitted_s":13684.000000000002,"state":"CANCELLED","since_s":15498.100000000002,"waited_s":1814.1000000000004,"accounted_s":15498.100000000002,"total":1000.0}');
INSERT INTO "jobs" VALUES(13,'j53','ann','größe
''; DROP TABLE jobs;--','PENDING',0,1,1,'[]',1.36910000000000018184e+04,1.36910000000000018184e+04,0,0.0,NULL,0.0,0.0,'','{"id":"j53","spec":{"user":"ann","name":"größe\n''; DROP TABLE jobs;--"},"submitted_s":13691.000000000002,"since_s":13691.000000000002,"accounted_s":13691.000000000002}');
INSERT INTO "jobs" VALUES(14,'j56','bob','','STARTING',0,1,1,'["h0.4"]',1.54980000000000018188e+04,1.82121000000000021834e+04,1,0.0,NULL,0.0,0.0,'it fits','{"id":"j56","spec":{"user":"bob"},"submitted_s":15498.000000000002,"state":"STARTING","since_s":18212.100000000002,"attempt":1,"devices":["h0.4"],"attempt_began_s":18212.100000000002,"waited_s":2714.1000000000004,"accounted_s":18212.100000000002,"reason":"it fits"}');
INSERT INTO "jobs" VALUES(15,'j58','ann','größe
''; DROP TABLE jobs;--','PENDING',1,1,1,'[]',1.6398100000000002183e+04,1.6398100000000002183e+04,0,0.0,NULL,0.0,0.0,'','{"id":"j58","spec":{"user":"ann","name":"größe\n''; DROP TABLE jobs;--","priority":1,"retries":1},"submitted_s":16398.100000000002,"since_s":16398.100000000002,"accounted_s":16398.100000000002}');
INSERT INTO "jobs" VALUES(16,'j60','ann','','PENDING',1,1,1,'[]',1.82051000000000021824e+04,1.82051000000000021824e+04,0,0.0,NULL,0.0,0.0,'','{"id":"j60","spec":{"user":"ann","priority":1,"after":[{"job":"j10","condition":"any"}],"retries":1},"submitted_s":18205.100000000002,"since_s":18205.100000000002,"accounted_s":18205.100000000002,"unmet":["j10"]}');
INSERT INTO "jobs" VALUES(17,'j64','bob','','PENDING',-1,1,2,'[]',22712.3,22712.3,0,0.0,NULL,0.0,0.0,'','{"id":"j64","spec":{"user":"bob","needs":{"max_devices":2},"priority":-1,"retries":1},"submitted_s":22712.3,"since_s":22712.3,"accounted_s":22712.3}');
INSERT INTO "jobs" VALUES(18,'j66','ann','','PENDING',0,1,1,'[]',2.36124999999999963628e+04,2.36124999999999963628e+04,0,0.0,1000.0,0.0,0.0,'','{"id":"j66","spec":{"user":"ann","total":1000.0},"submitted_s":23612.499999999996,"since_s":23612.499999999996,"waited_s":907.0999999999985,"accounted_s":24519.599999999995,"total":1000.0}');
INSERT INTO "jobs" VALUES(19,'j67','bob','','PENDING',1,1,1,'[]',2.45194999999999963609e+04,2.45194999999999963609e+04,0,0.0,NULL,0.0,0.0,'','{"id":"j67","spec":{"user":"bob","priority":1,"retries":1},"submitted_s":24519.499999999996,"since_s":24519.499999999996,"accounted_s":24519.499999999996}');
INSERT INTO "jobs" VALUES(20,'j68','ann','','PENDING',1,1,2,'[]',2.45195999999999949062e+04,2.45195999999999949062e+04,0,0.0,1000.0,0.0,0.0,'','{"id":"j68","spec":{"user":"ann","needs":{"max_devices":2},"priority":1,"total":1000.0,"after":[{"job":"j4"}],"retries":1},"submitted_s":24519.599999999995,"since_s":24519.599999999995,"accounted_s":24519.599999999995,"total":1000.0,"unmet":["j4"]}');
CREATE TABLE programs (job TEXT PRIMARY KEY, body TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO "programs" VALUES('j1','{"command":["train","j1"],"é":1}');
INSERT INTO "programs" VALUES('j10','{"command":["train","j10"],"é":1}');
INSERT INTO "programs" VALUES('j12','{"command":["train","j12"],"é":1}');
INSERT INTO "programs" VALUES('j21','{"command":["train","j21"],"é":1}');
INSERT INTO "programs" VALUES('j30','{"command":["train","j30"],"é":1}');
INSERT INTO "programs" VALUES('j31','{"command":["train","j31"],"é":1}');
INSERT INTO "programs" VALUES('j34','{"command":["train","j34"],"é":1}');
INSERT INTO "programs" VALUES('j35','{"command":["train","j35"],"é":1}');
INSERT INTO "programs" VALUES('j37','{"command":["train","j37"],"é":1}');
INSERT INTO "programs" VALUES('j4','{"command":["train","j4"],"é":1}');
INSERT INTO "programs" VALUES('j50','{"command":["train","j50"],"é":1}');
INSERT INTO "programs" VALUES('j52','{"command":["train","j52"],"é":1}');
INSERT INTO "programs" VALUES('j53','{"command":["train","j53"],"é":1}');
INSERT INTO "programs" VALUES('j56','{"command":["train","j56"],"é":1}');
INSERT INTO "programs" VALUES('j58','{"command":["train","j58"],"é":1}');
INSERT INTO "programs" VALUES('j60','{"command":["train","j60"],"é":1}');
INSERT INTO "programs" VALUES('j64','{"command":["train","j64"],"é":1}');
INSERT INTO "programs" VALUES('j66','{"command":["train","j66"],"é":1}');
INSERT INTO "programs" VALUES('j67','{"command":["train","j67"],"é":1}');
INSERT INTO "programs" VALUES('j68','{"command":["train","j68"],"é":1}');
CREATE TABLE reservations (position INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, body TEXT NOT NULL);
INSERT INTO "reservations" VALUES(1,'r5','{"id":"r5","devices":["h1.5"],"start_s":2791.3999999999996,"end_s":2851.3999999999996,"users":["ann"]}');
INSERT INTO "reservations" VALUES(2,'r1','{"id":"r1","devices":["h1.5"],"start_s":3727.199999999999,"end_s":3787.199999999999,"users":["ann"]}');
CREATE TABLE users (
            position INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, limits TEXT NOT NULL,
            usage_device_s REAL NOT NULL, accounted_s REAL NOT NULL, num_devices INTEGER NOT NULL);
INSERT INTO "users" VALUES(1,'ann','{}',9.05047933544917782445e+02,9162.5,1);
INSERT INTO "users" VALUES(2,'bob','{}',3.05842184222617106568e+04,1.82121000000000021834e+04,3);
INSERT INTO "users" VALUES(3,'user5','{"max_queued":5,"share":6}',0.0,2.81289999999999918139e+03,0);
INSERT INTO "users" VALUES(4,'user3','{"max_queued":3,"share":4}',0.0,2.81289999999999918139e+03,0);
INSERT INTO "users" VALUES(5,'user4','{"max_queued":4,"share":5}',0.0,2.81289999999999918139e+03,0);
INSERT INTO "users" VALUES(6,'user1','{"max_queued":1,"share":2}',0.0,0.0,0);
INSERT INTO "users" VALUES(7,'user0','{}',0.0,0.0,0);
CREATE INDEX events_of_job ON events (job, number) WHERE job IS NOT NULL;
CREATE TRIGGER events_stay BEFORE DELETE ON events BEGIN SELECT RAISE(ABORT, 'the log only grows'); END;
CREATE TRIGGER events_hold BEFORE UPDATE ON events BEGIN SELECT RAISE(ABORT, 'the log only grows'); END;
CREATE INDEX jobs_by_state ON jobs (state, number);
CREATE INDEX jobs_by_user ON jobs (user, state, number);
CREATE UNIQUE INDEX attempts_under_way ON attempts (job) WHERE ended_s IS NULL;
COMMIT;
