// The script of the page at /.

import { loadModels, startChat } from "./chat.js";
import { refresh, startCluster } from "./cluster.js";

startChat(refresh);
await Promise.all([loadModels(), startCluster()]);
